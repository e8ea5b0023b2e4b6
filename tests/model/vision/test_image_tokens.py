"""What ids and positions say of images, from configurations alone."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from longspan.errors import DataError, ModelError
from longspan.model.vision.image_encoder import encode_images
from longspan.model.vision.image_inputs import ImageInput, encoding_order, image_arguments
from longspan.model.vision.image_tokens import ImageTokens, image_tokens
from longspan.model.vision.videos import Video, VideoTokens
from tests.model.vision.documents import raw
from tests.model.vision.models import IMAGE, VIDEO, config_of, here, tiny

# of every image; others by grid
ROWS = {"llava-clip": 4, "llava-siglip": 4, "gemma3": 9, "paligemma": 4, "paligemma2": 4}


GRIDS = [name for name in here() if name not in ROWS and not name.startswith("gemma4")]


@pytest.mark.parametrize("name", [*ROWS, *GRIDS])
def test_rows_are_those_that_the_model_makes(name: str) -> None:
    tokens = image_tokens(config_of(name))
    assert tokens == ImageTokens(IMAGE, 1 if name in ROWS else 2, ROWS.get(name))
    assert tokens.rows((1, 4, 6)) == ROWS.get(name, 6)


def test_rows_that_a_processor_counts() -> None:
    for name in (name for name in here() if name.startswith("gemma4")):
        with pytest.raises(DataError, match="they depend on which of its patches are padding"):
            image_tokens(config_of(name)).rows(None)


@pytest.mark.parametrize("name", GRIDS)
def test_positions_are_those_of_the_model(name: str) -> None:
    tokens, base = image_tokens(config_of(name)), tiny(name).model
    for document in raw(tokens):
        grids = np.array([image.grid for image in document.images])
        made = tokens.positions(document.ids, grids)
        if not len(grids):
            assert made is None
            continue
        ids = torch.from_numpy(document.ids)[None]
        wanted, _ = base.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=torch.from_numpy(grids))
        assert made is not None and np.array_equal(made, wanted[:, 0].numpy())


def test_what_does_not_fit_is_named_with_both_counts() -> None:
    assert image_tokens(config_of("llava-clip")).positions(np.array([1, 60, 60, 60, 60, 2]), np.zeros((1, 3))) is None
    tokens, says = image_tokens(config_of("qwen3-vl")), r"1 run of placeholders \(token id {}\) of \[8\] tokens, its "
    with pytest.raises(DataError, match="has " + says.format(60) + "2 images make"):
        tokens.positions(np.array([1, *[60] * 8, 2]), np.array([(1, 4, 4), (1, 4, 4)]))
    with pytest.raises(DataError, match=r"grid of patches \(1, 3, 4\); give \(t, h, w\), h and w multiples of 2"):
        tokens.rows((1, 3, 4))
    with pytest.raises(ModelError, match="Qwen3Config has no image_token_id and vision_config"):
        image_tokens(Qwen3Config())
    videos = VideoTokens.from_configuration(config_of("qwen3-vl"))
    assert videos.rows((3, 4, 6)) == [6, 6, 6]
    with pytest.raises(DataError, match=says.format(59) + r"1 video make \[4, 4\]"):
        videos.positions(np.array([1, *[VIDEO] * 8, 2]), np.zeros((0, 3)), [Video((2, 4, 4))])
    with pytest.raises(DataError, match=r"a video has 20 patches and the grid \(2, 4, 4\), which is of 32"):
        videos.inputs(torch.zeros(20, 24), (2, 4, 4))
    with pytest.raises(ModelError, match="LlavaConfig is not of a model that takes videos by a video_token_id"):
        VideoTokens.from_configuration(config_of("llava-clip"))
    lacking = config_of("qwen3-vl")
    lacking.video_token_id = 99  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModelError, match="token id 99, and Qwen3VLConfig has 62 ids"):
        VideoTokens.from_configuration(lacking)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_positions_of_videos_are_those_of_the_model(name: str) -> None:
    videos, base = VideoTokens.from_configuration(config_of(name)), tiny(name).model
    assert videos.placeholder == VIDEO and videos.apart == (name == "qwen3-vl")
    for document in raw(videos.images, "videos"):
        if not document.videos:
            continue
        grids, ids = np.array([image.grid for image in document.images]), torch.from_numpy(document.ids)[None]
        media = {"video_grid_thw": torch.tensor([video.grid for video in document.clips])}
        media |= {"image_grid_thw": torch.from_numpy(grids)} if len(grids) else {}
        if name == "qwen2.5-vl":
            media["second_per_grid_ts"] = torch.tensor([video.seconds for video in document.clips]).float()
        wanted, _ = base.get_rope_index(ids, (ids == IMAGE).int() + 2 * (ids == VIDEO).int(), **media)
        made = videos.positions(document.ids, grids, document.clips)
        assert made is not None and np.array_equal(made, wanted[:, 0].numpy())


# ---- images as arguments of a model: joined, filled up where a field says their size, and refused by name

LIKE = torch.zeros(1, dtype=torch.float64)
WIDE, TALL = torch.ones(1, 3, 4, 8), torch.ones(2, 3, 8, 4)


class Plain:
    def get_image_features(self, pixel_values: Any, vision_feature_layer: Any = None, **more: Any) -> None: ...


class Masked:
    def get_image_features(self, pixel_values: Any, pixel_attention_mask: Any = None) -> None: ...


class Shaped:
    def get_image_features(self, pixel_values: Any, spatial_shapes: Any, pixel_attention_mask: Any) -> None: ...


class Sized:
    def get_image_features(self, pixel_values: Any, image_sizes: Any, batch_num_images: Any = None) -> None: ...


def masked(pixels: torch.Tensor) -> ImageInput:
    return ImageInput(pixels, fields={"pixel_attention_mask": torch.ones(pixels[:, 0].shape, dtype=torch.int32)})


def test_tiles_of_several_sizes_are_filled_up_where_a_mask_says_so() -> None:
    made = image_arguments(Masked(), [masked(WIDE), masked(TALL)], LIKE)
    pixels, mask = made["pixel_values"], made["pixel_attention_mask"]
    assert pixels.shape == (1, 3, 3, 8, 8) and pixels.dtype == torch.float64
    assert mask.shape == (1, 3, 8, 8) and mask.dtype == torch.int32
    assert torch.equal(pixels[0, :, 0], mask[0].double()) and mask.sum() == 3 * 32
    assert mask[0, 0, :4].all() and mask[0, 1, :, :4].all()


REFUSED: dict[str, tuple[Any, list[ImageInput], str]] = {
    "a field that it does not take": (
        Plain(),
        [ImageInput(WIDE, fields={"spatial_shapes": torch.ones(1, 2)})],
        "images have spatial_shapes, and get_image_features of Plain takes pixel_values, vision_feature_layer alone",
    ),
    "fields that it asks for": (
        Shaped(),
        [ImageInput(WIDE)],
        "Shaped makes rows of an image by spatial_shapes, pixel_attention_mask, which its images lack",
    ),
    "sizes": (Sized(), [ImageInput(WIDE)], r"by image_sizes, .* give ImageInput\(pixels, size=\(height, width\)\)"),
    "a field of some": (Masked(), [masked(WIDE), ImageInput(WIDE)], "1 of 2 images have pixel_attention_mask"),
    "several sizes": (Plain(), [ImageInput(WIDE), ImageInput(TALL)], "2 images have pixels of 2 shapes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    model, inputs, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        image_arguments(model, inputs, LIKE)


@pytest.mark.parametrize(
    ("counts", "documents"), [((1, 1), [1, 1]), ((2, 1, 3, 1), [1, 1, 2]), ((3, 1), [1, 2]), ((2, 2, 2), [3])]
)
def test_images_alone_in_their_documents_come_first(counts: tuple[int, ...], documents: list[int]) -> None:
    class Model(torch.nn.Module, Sized):
        def get_image_features(self, pixel_values: Any, image_sizes: Any, batch_num_images: Any, **_: Any) -> Any:  # type: ignore[override]
            assert batch_num_images.tolist() == documents
            rows = [pixels.mean().expand(i + 1, 1) for i, pixels in enumerate(pixel_values)]
            return type("Output", (), {"pooler_output": rows})

    fields = [{"batch_num_images": torch.tensor([count])} for count in counts]
    pixels = [torch.full((1, 3, 4, 4), float(value)) for value in range(len(counts))]
    inputs = [ImageInput(x, size=(4, 4), fields=of_image) for x, of_image in zip(pixels, fields, strict=True)]
    model = Model()
    model.weight = torch.nn.Parameter(LIKE)
    order = encoding_order(inputs)
    (rows,) = encode_images(model, inputs)
    assert rows[:, 0].tolist() == [float(i) for i in range(len(counts)) for _ in range(order.index(i) + 1)]

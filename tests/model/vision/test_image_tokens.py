"""What ids and positions say of images, from configurations alone."""

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from longspan.errors import DataError, ModelError
from longspan.model.vision.image_tokens import ImageTokens, Video, VideoTokens, image_tokens
from tests.model.vision.documents import raw
from tests.model.vision.models import IMAGE, VIDEO, config_of, here, tiny

# of every image; others by grid
ROWS = {"llava-clip": 4, "llava-siglip": 4, "gemma3": 9, "paligemma": 4, "paligemma2": 4}


@pytest.mark.parametrize("name", here())
def test_rows_are_those_that_the_model_makes(name: str) -> None:
    tokens = image_tokens(config_of(name))
    assert tokens == ImageTokens(IMAGE, 1 if name in ROWS else 2, ROWS.get(name))
    assert tokens.rows((1, 4, 6)) == ROWS.get(name, 6)


@pytest.mark.parametrize("name", [name for name in here() if name not in ROWS])
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
    videos = VideoTokens.of(config_of("qwen3-vl"))
    assert videos.rows((3, 4, 6)) == [6, 6, 6]
    with pytest.raises(DataError, match=says.format(59) + r"1 video make \[4, 4\]"):
        videos.positions(np.array([1, *[VIDEO] * 8, 2]), np.zeros((0, 3)), [Video((2, 4, 4))])
    with pytest.raises(DataError, match=r"a video has 20 patches and the grid \(2, 4, 4\), which is of 32"):
        videos.inputs(torch.zeros(20, 24), (2, 4, 4))
    with pytest.raises(ModelError, match="LlavaConfig is not of a model that takes videos by a video_token_id"):
        VideoTokens.of(config_of("llava-clip"))
    lacking = config_of("qwen3-vl")
    lacking.video_token_id = 99  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModelError, match="token id 99, and Qwen3VLConfig has 62 ids"):
        VideoTokens.of(lacking)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_positions_of_videos_are_those_of_the_model(name: str) -> None:
    videos, base = VideoTokens.of(config_of(name)), tiny(name).model
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

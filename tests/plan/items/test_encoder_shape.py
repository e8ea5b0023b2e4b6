"""FLOPs of images by a configuration are those that torch counts in the tower and projector of the same model."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.model.multimodal.image_modules import freeze_image_modules
from longspan.model.vision.image_encoder import split_off_image_encoder
from longspan.model.vision.image_tokens import image_tokens
from longspan.plan import plan_dynamic
from longspan.plan.items.encoder_shape import EncoderShape
from tests.model.vision.documents import raw
from tests.model.vision.models import config_of, here, tiny

QWEN3_VL_8B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {"hidden_size": 4096},
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "in_channels": 3}
    | {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "deepstack_visual_indexes": [8, 16, 24]},
}

PRICED = ("llava-clip", "llava-siglip", "gemma3", "paligemma", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5")


def counted_flops(name: str, trained: Any) -> int:
    model = tiny(name)
    model.config.vision_config._attn_implementation = "eager"
    freeze_image_modules(model, trained)
    encoder = split_off_image_encoder(model)
    for module in encoder.modules():
        if hasattr(module, "use_head"):
            setattr(module, "use_head", False)  # noqa: B010  # SigLIP's, whose output is not read
    images = [image for document in raw(image_tokens(model.config)) for image in document.images]
    with FlopCounterMode(display=False) as counter:
        rows = encoder(images)
        if rows.requires_grad:
            rows.square().sum().backward()
    return counter.get_total_flops()


def cases() -> Iterator[Any]:
    for name, trained in product((name for name in PRICED if name in here()), ("all", "projector", "none")):
        often = (name, trained) in (("qwen2.5-vl", "all"), ("qwen3-vl", "projector"), ("llava-clip", "projector"))
        yield pytest.param(name, trained, marks=() if often else pytest.mark.whole)


@pytest.mark.parametrize(("name", "trained"), [*cases()])
def test_as_torch_counts(name: str, trained: Any) -> None:
    config, tokens = config_of(name), image_tokens(config_of(name))
    shape = EncoderShape.of(config)
    images = [image for document in raw(tokens) for image in document.images]
    flops = shape.flops([tokens.rows(image.grid) for image in images], trained=trained)
    for frames, *sides in (image.grid for image in images if shape.window_layers):  # windows that an edge cuts
        window = shape.window
        cut = [side // window * window**2 + (side % window) ** 2 for side in sides]
        beyond = frames * (sides[0] * sides[1] * window**2 - cut[0] * cut[1])
        flops -= (12 if trained == "all" else 4) * shape.width * shape.window_layers * beyond
    if name == "llava-clip":  # whose last layer is not read
        vision, rows = config.vision_config, len(images) * 5
        weights = vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
        flops += 2 * weights * rows + 4 * vision.hidden_size * rows * 5
    assert flops == counted_flops(name, trained) and shape == EncoderShape.of(config.to_dict())


def test_images_of_gemma_3_have_as_many_rows_as_its_configuration_says() -> None:
    tower = {"model_type": "siglip_vision_model", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tower |= {"image_size": 64, "patch_size": 4, "intermediate_size": 16}
    config: dict[str, Any] = {"model_type": "gemma3", "text_config": {"hidden_size": 16}, "vision_config": tower}
    assert EncoderShape.of(config | {"mm_tokens_per_image": 64}).rows == 64
    assert EncoderShape.of(config).rows == 256  # as Gemma3Config has it
    with pytest.raises(
        PlanError, match=r"dict \(qwen3\) has no tower that its configuration prices; those of gemma3, "
    ):
        EncoderShape.of({"model_type": "qwen3", "hidden_size": 8})


def test_a_published_size() -> None:
    shape = EncoderShape.of(QWEN3_VL_8B)
    per_patch = 27 * 1152 * (4 * 1152 + 2 * 4304) + 1152 * 3 * 2 * 256
    merged = 4 * (4 * 1152) * (4 * 1152 + 4096)
    weights = 6 * (per_patch * 1024 + merged * 256) - 2 * 1152 * 1536 * 1024
    assert shape.flops([256]) == weights + 12 * 27 * 1152 * 1024**2
    cost = shape.cost()
    frozen, none = (shape.cost(trained=trained) for trained in ("projector", "none"))  # the tower: a forward pass
    assert cost.attention_seconds == pytest.approx(3.5 * frozen.attention_seconds, rel=1e-12)
    assert frozen.attention_seconds == none.attention_seconds
    assert cost.linear_seconds > frozen.linear_seconds > none.linear_seconds
    plan = plan_dynamic((4096, *[1024] * 8), Layout(2), max_cp=1, cost=cost)
    rows = [sum(g.tokens for g in plan.micro_batches[0].groups if slot in g.slots) for slot in (0, 1)]
    assert sorted(rows) == [4096, 8192]  # the large image takes as long as twice its rows in small ones
    seconds = cost.linear_seconds * 256 + cost.attention_seconds * 256**2
    assert seconds == pytest.approx(weights / 2.4e14 + 14 * 27 * 1152 * 1024**2 / (6.18e14 * 72 / 96))


def test_an_encoder_by_its_numbers() -> None:
    # windows of 4 x 4 patches, 2 x 2 patches of a row
    cost = EncoderShape(width=8, full_layers=2, block_weights=100, window_layers=3, window=4, merge=2).cost()
    pair = 14 * 8 / 6.18e14
    assert cost.linear_seconds == pytest.approx(4 * 6 * 100 / 2.4e14 + 4 * 3 * 16 * pair)
    assert cost.attention_seconds == pytest.approx(2 * 16 * pair)  # all patches of a row with all of another: 4 x 4

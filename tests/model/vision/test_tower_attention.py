"""A tower that packs its images attends to all in one call a layer: rows and gradients are those of the stock tower."""

from typing import Any

import pytest
from torch import Tensor

from longspan.doctor.stock import compute_in_float64
from longspan.model.vision import image_encoder
from longspan.model.vision.image_encoder import split_off_image_encoder
from longspan.model.vision.image_tokens import image_tokens
from tests.model.vision.documents import raw
from tests.model.vision.models import config_of, here, tiny


def encoded(name: str, *, packed: bool) -> dict[str, Tensor]:
    with compute_in_float64():
        encoder = split_off_image_encoder(tiny(name))
        if packed:
            image_encoder.pack_attention(encoder)
        rows = encoder([image for document in raw(image_tokens(config_of(name))) for image in document.images])
        rows.square().sum().backward()
    gradients = {n: p.grad for n, p in encoder.named_parameters() if p.grad is not None}
    return {"rows": rows.detach(), **gradients}


def error(name: str) -> float:
    stock, packed = encoded(name, packed=False), encoded(name, packed=True)
    assert stock.keys() == packed.keys()
    scale = {n: max(x.abs().max().item(), 1e-3) for n, x in stock.items()}
    return max(((packed[n] - x).abs().max() / scale[n]).item() for n, x in stock.items())


def calls(name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows, attend = list[int](), image_encoder.attend

    def noted(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(len(q))
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(image_encoder, "attend", noted)
    encoded(name, packed=True)
    return rows


OFTEN = ("qwen2.5-vl", "qwen3-vl")  # windows, and none; the others run with make test-all


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.whole) for n in here()])
def test_as_the_stock_tower(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(name) < 1e-12
    patches, depth = 24 + 16 + 8 + 32 + 12 + 16 + 4, getattr(config_of(name).vision_config, "depth", 0)
    if name.startswith(("llava", "qwen")):
        assert calls(name, monkeypatch) == [patches] * depth  # none where images are whole: those are a batch


def test_a_chosen_function_stays() -> None:
    model = tiny("qwen3-vl")
    model.config.vision_config._attn_implementation = "eager"
    image_encoder.pack_attention(split_off_image_encoder(model))
    assert model.config.vision_config._attn_implementation == "eager"

"""NF4 beside bitsandbytes, bit for bit; what a plan of memory counts as packed; and what cannot lie in 4 or 8 bits.

Refusals come by name and numbers, before the first collective. That `prepare` leaves a refused model as it was is in
test_loaded_models.py.
"""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import preset_config
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.feature import Call
from longspan.model.features import features_of
from longspan.model.frozen.frozen_weights import weights_to_pack
from longspan.model.frozen.packed_format import NF4, VALUES
from longspan.model.options import PrepareOptions
from longspan.plan.shape.packed import packed_weights_of_model
from tests.model.frozen.packed_models import adapted
from tests.mutation import Change, mutated

PATH = "model.frozen.packed_format"
MUTATIONS: dict[str, Change] = {  # noticed beside bitsandbytes
    "the lower half first": (PATH, "codes[:, ::2] << 4 | codes[:, 1::2]", "codes[:, 1::2] << 4 | codes[:, ::2]"),
    "halves swapped": (PATH, "(codes >> 4, codes & 15)", "(codes & 15, codes >> 4)"),
    "a scale of the largest number": (PATH, "blocks.abs().amax(-1)", "blocks.amax(-1)"),
    "other limits": (PATH, "(values[:-1] + values[1:]) / 2", "(values[:-1] + values[1:]) / 2 + 1e-6"),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _weight(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(96, 448)
    weight[3, 64:128] = 0.0  # a block of zeros
    weight[4, 5] = 30.0
    weight[5] *= 1e-30
    limits = torch.tensor(VALUES["nf4"])
    weight[6, :15], weight[6, 15] = (limits[:-1] + limits[1:]) / 2, 1.0  # between two codes
    return weight.to(dtype)


@pytest.mark.parametrize("name", MUTATIONS)
def test_other_codes_and_values_are_noticed(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    with mutated(MUTATIONS[name]), pytest.raises(AssertionError):
        test_codes_scales_and_values_are_those_of_bitsandbytes(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_scales_and_values_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = _weight(dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    packed = NF4.pack(weight)
    assert torch.equal(packed[:, :224].reshape(-1, 1), codes)
    assert torch.equal(packed[:, 224:].contiguous().view(torch.float32).flatten(), state.absmax)
    values = torch.empty_like(weight)
    NF4.unpack(packed, values)
    assert torch.equal(values, functional.dequantize_4bit(codes, state))


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(torch.float32)
    whole, values = NF4.pack(weight), torch.empty_like(weight)
    monkeypatch.setattr("longspan.model.frozen.packed_format._PIECE", 5 * 448)
    assert torch.equal(NF4.pack(weight), whole)
    NF4.unpack(whole, values)
    of_pieces = torch.empty_like(weight)
    monkeypatch.undo()
    NF4.unpack(whole, of_pieces)
    assert torch.equal(values, of_pieces)
    assert whole.shape == (96, 224 + 7 * 4)


def test_what_cannot_be_packed_is_told() -> None:
    assert NF4.rows.reason_against(128) == ""
    assert NF4.rows.reason_against(100) == "its rows have 100 numbers, which blocks of 64 do not divide"


@pytest.mark.parametrize(
    "preset", ["qwen3-tiny", "llama-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "qwen3-0.6b", "qwen3-30b-a3b"]
)
def test_the_shape_says_what_is_packed(preset: str) -> None:
    config = preset_config(preset, vocab_size=2048)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    places = weights_to_pack(model)
    assert sum(getattr(module, name).numel() for module, name in places.values()) == sum(
        packed_weights_of_model(config, "nf4")[::2]
    )


# ---- what is refused


def whole_copy() -> Any:
    model = adapted().unload()
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj"]))


def dora() -> Any:
    return peft.get_peft_model(adapted().unload(), peft.LoraConfig(target_modules=["q_proj"], use_dora=True))


def trained_base() -> Any:
    model = adapted()
    model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.requires_grad_(True)
    return model


TP = Layout(ranks=2, tp=2)
CASES: dict[str, tuple[Callable[[], Any], Layout, dict[str, Any], str]] = {
    "a width of 100": (
        lambda: adapted(intermediate_size=100),
        Layout(ranks=1),
        {},
        r"the weights of LlamaForCausalLM cannot be frozen as 'nf4': model.layers.0.mlp.down_proj.weight: its rows "
        "have 100 numbers, which blocks of 64 do not divide, as 1 more; or use",
    ),
    "linears of few outputs": (
        lambda: adapted(
            hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=48
        ),
        Layout(ranks=1),
        {},
        r"its decoder layers have no experts, and none of their 14 linears has the 64 outputs from which on weights "
        r"are packed \(the most have 48\); or use",
    ),
    "a width that tp cuts": (
        lambda: adapted(intermediate_size=192),
        TP,
        {},
        r"mlp.down_proj.weight: its rows have 96 numbers, .* on each of 2 tensor-parallel ranks; use tp 1, as 1 more",
    ),
    "full training": (
        lambda: adapted().unload().requires_grad_(),
        Layout(ranks=1),
        {},
        "no LoRA adapter, .* set lora.rank",
    ),
    "whole modules": (whole_copy, Layout(ranks=1), {}, r"modules_to_save trains model.layers.0.mlp.down_proj, which"),
    "DoRA": (dora, Layout(ranks=1), {}, "use_dora"),
    "trained weights": (trained_base, Layout(ranks=1), {}, r"1 weight of them .*up_proj.* are trained; freeze them"),
    "copies": (adapted, Layout(ranks=1), {"shard_parameters": False}, "shard_parameters=False. is not packed"),
    "no stored folder": (adapted, Layout(ranks=1), {"frozen": "stored"}, 'no folder in 4 or 8 bits .* frozen="nf4"'),
    "a word": (adapted, Layout(ranks=1), {"frozen": "int4"}, "frozen is 'int4'; use nf4, stored or whole"),
}


class Home:
    """A world that no message passes."""

    def __init__(self, home: Layout) -> None:
        self.home = home
        self.device = torch.device("cpu")


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_packed_is_refused(case: str) -> None:
    make, layout, options, message = CASES[case]
    model: Any = unwrap_peft_model(make())
    with pytest.raises(ModelError, match=message):
        call = Call(model, model, Home(layout), PrepareOptions(**{"frozen": "nf4", **options}))  # pyright: ignore
        (feature,) = [x for x in features_of(call) if type(x).__name__ == "FrozenFeature"]
        feature.refuse(model)

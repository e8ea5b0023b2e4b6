"""What cannot lie in 4 or 8 bits is refused by name and numbers, before the first collective.

That `prepare` leaves a refused model as it was is in test_loaded_models.py.
"""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.features import Call, features_of
from longspan.model.options import PrepareOptions
from tests.model.frozen.packed_models import adapted


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
    "a width that tp cuts": (
        lambda: adapted(intermediate_size=192),
        TP,
        {},
        r"mlp.down_proj.weight: its rows have 96 numbers, .* on each of 2 tensor-parallel ranks; use tp 1, as 1 more",
    ),
    "full training": (lambda: adapted().unload(), Layout(ranks=1), {}, "no LoRA adapter, .* set lora.rank"),
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

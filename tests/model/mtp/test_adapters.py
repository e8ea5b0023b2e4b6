"""Adapters beside depths of multi-token prediction: losses and every gradient are those of one process."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import peft
import pytest

from longspan import Layout, MtpLoss, World, plan_dynamic, plan_fixed, prepare, run_step
from longspan.doctor.stock import whole_float64
from longspan.errors import ModelError
from longspan.model import add_mtp
from longspan.testing import run_ranks
from tests.model.lora.adapted import drawn
from tests.model.mtp.dense import LENGTHS, WEIGHT, Answer, dense, with_depths
from tests.model.stock import gradients_of, texts, tiny, worst
from tests.mutation import each_mutated

EXACT, WHOLE = 1e-11, "model.mtp"
HOMES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "cp 2": (Layout(ranks=2), {"activation_checkpointing": "full"}),
    "tp 2, rows in parts": (Layout(ranks=2, tp=2), {"sequence_parallel": True}),
    "tp 2": (Layout(ranks=2, tp=2), {"shard_parameters": False}),
    "pp 2": (Layout(ranks=2, pp=2), {}),
}
FAMILIES = ("qwen3", "bamba, a scan last", "zamba2")
TRAINED: dict[str, dict[str, Any]] = {"their adapters": {}, "whole": {"modules_to_save": ["mtp"]}}  # of depths
LINEARS = ["eh_proj", "q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "down_proj"]


def adapted(family: str, **more: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, **more}
    return drawn(peft.get_peft_model(with_depths(family, 2), peft.LoraConfig(**settings)))


@cache
def wanted(family: str, trained: str) -> Answer:
    with whole_float64():
        model = adapted(family, **TRAINED[trained]).train().get_base_model()
        mtp: Any = model.mtp
        model.mtp = getattr(mtp, "modules_to_save", {"default": mtp})["default"]
        return dense(model, texts(LENGTHS))


def _errors(rank: int, trained: str, families: Sequence[str]) -> dict[str, float]:
    errors = dict[str, float]()
    for name, (layout, options) in HOMES.items():
        with World(layout) as world, whole_float64():
            for family in families:
                exact, model = wanted(family, trained), prepare(adapted(family, **TRAINED[trained]), world, **options)
                rows = layout.tp if "sequence_parallel" in options else 1
                plans = {
                    "fixed": plan_fixed(LENGTHS, layout, cp=layout.slots, max_tokens_per_slot=40, row_multiple=rows),
                    "dynamic": plan_dynamic(LENGTHS, layout, max_tokens_per_slot=40, row_multiple=rows),
                }
                for kind, plan in plans.items():
                    result = run_step(model, plan, texts(LENGTHS), world, mtp=MtpLoss(weight=WEIGHT))
                    found = gradients_of(model)
                    assert all(".lora_" in key or (trained == "whole" and key.startswith("mtp.")) for key in found)
                    assert layout.pp > 1 or any(key.startswith("mtp.layers.1.eh_proj.") for key in found)
                    errors[f"{name}, {family}, {kind}"] = exact.error(result, found, in_part=layout.pp > 1)
                    model.zero_grad()
    return errors


@pytest.mark.whole
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("families", [FAMILIES[:2], FAMILIES[2:]], ids=["qwen3 and bamba", "zamba2"])
def test_losses_and_gradients_are_those_of_one_process(trained: str, families: Sequence[str]) -> None:
    for errors in run_ranks(_errors, 2, trained, families, timeout=300):
        assert len(errors) == 2 * len(HOMES) * len(families)
        assert all(error <= EXACT for error in errors.values()), errors


MUTATIONS = {
    "the depths that were there before": (WHOLE, "model._modules[PREFIX] = copies[0]", "pass"),
    "a configuration of their own": (WHOLE, "copies[0].get_submodule(name).config = config", "pass"),
}


def _mutated(rank: int) -> dict[str, float]:
    errors = dict[str, float]()
    with World(Layout(ranks=2)) as world, whole_float64():
        exact = wanted("qwen3", "whole").gradients
        for name in each_mutated(MUTATIONS):
            try:
                model = prepare(adapted("qwen3", **TRAINED["whole"]), world)
                plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=40)
                run_step(model, plan, texts(LENGTHS), world, mtp=MtpLoss(weight=WEIGHT))
                errors[name] = worst(gradients_of(model), exact)
            except ModelError:
                errors[name] = math.inf
    return errors


@pytest.mark.whole
def test_mutations_are_noticed() -> None:
    for errors in run_ranks(_mutated, 2, timeout=60):
        assert errors.pop("nothing") <= EXACT
        assert all(error > 1e-6 for error in errors.values()), errors


def _refused(rank: int) -> list[str]:
    told = list[str]()
    with World(Layout(ranks=2, pp=2)) as world:
        in_part = adapted("llama", modules_to_save=["mtp"])
        in_part.base_model.model.mtp.modules_to_save["default"].layers[1].eh_proj.requires_grad_(False)
        twice = adapted("llama")
        for name, parameter in twice.base_model.model.mtp.named_parameters():
            parameter.requires_grad_(".lora_" not in name or parameter.requires_grad)
        for peft_model in (adapted("llama", target_modules=["q_proj", "embed_tokens"]), in_part, twice):
            mtp = peft_model.base_model.model.mtp
            with pytest.raises(ModelError) as error:
                prepare(peft_model, world)
            assert peft_model.base_model.model.mtp is mtp  # as it was
            told.append(str(error.value))
    return told


@pytest.mark.whole
def test_what_is_refused() -> None:
    for of_embedding, in_part, twice in run_ranks(_refused, 2, timeout=60):
        assert "leave it out of target_modules, or use pp 1" in of_embedding
        assert "of its depths of multi-token prediction require gradients" in in_part
        assert "are trained whole and have adapters (mtp.layers.0.eh_proj, " in twice


def test_depths_come_before_an_adapter() -> None:
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
    with pytest.raises(ModelError, match="call add_mtp first"):
        add_mtp(model)  # pyright: ignore[reportArgumentType]

"""Vision-language models with adapters in any part, or frozen parts: loss and gradients are those of stock peft."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import peft
import pytest
from torch import nn

from longspan import Layout, World, prepare, run_step
from longspan.errors import ModelError
from longspan.model.layers import is_in_projector, towers_beside_text_model
from longspan.model.multimodal.image_modules import freeze_image_modules
from longspan.model.vision.image_tokens import image_tokens
from longspan.testing import run_ranks
from longspan.train import disable_adapter
from tests.model.lora.adapted import drawn
from tests.model.vision.documents import Answer, answer_of, documents_of
from tests.model.vision.joined import BOUND, Case, step
from tests.model.vision.models import config_of, here, tiny
from tests.mutation import each_mutated

LANGUAGE_MODEL, PROJECTOR, TOWER = ALL = ("language model", "projector", "tower")
ENCODER = (PROJECTOR, TOWER)
FAMILIES = [name for name in ("llava-clip", "qwen2.5-vl", "qwen3-vl") if name in here()]


def adapted(name: str, parts: Sequence[str]) -> Any:
    model = tiny(name)
    of_towers = {id(linear) for tower in towers_beside_text_model(model) for linear in tower.modules()}
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"}
    part_of = {
        n: LANGUAGE_MODEL if id(m) not in of_towers else PROJECTOR if is_in_projector(n) else TOWER
        for n, m in linears.items()
    }
    targets = [n for n, part in part_of.items() if part in parts]
    return drawn(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets)))


@cache
def wanted(name: str, parts: tuple[str, ...]) -> Answer:
    return answer_of(name, make=lambda: adapted(name, parts).get_base_model())


def error_of(case: Case, parts: tuple[str, ...]) -> float:
    make = partial(adapted, case.name, parts)
    return max(step(case, wanted(case.name, parts), make=make, trains=".lora_").values())


def cases_of(ranks: int) -> list[tuple[Case, tuple[str, ...]]]:
    one = Layout(ranks)
    cases = [(Case(name, one, one, cp), ALL) for name in FAMILIES for cp in (0, ranks)]
    cases += [(Case(name, one, one, ranks), ENCODER) for name in FAMILIES]
    if ranks == 2:
        copies, recomputed = (("shard_parameters", False),), (("activation_checkpointing", True),)
        for name in FAMILIES:
            cases.append((Case(name, Layout(2, tp=2), Layout(2, tp=2), 1), ALL))
            cases.append((Case(name, Layout(2, pp=2), Layout(2, tp=2), 1), ALL))
            cases.append((Case(name, one, Layout(2, tp=2), 2, options=copies), ENCODER))
        cases.append((Case("qwen2.5-vl", one, one, 2, options=recomputed), (TOWER,)))
    return cases


def _errors(rank: int, ranks: int) -> dict[str, float]:
    return {f"{case.label}, {' '.join(parts)}": error_of(case, parts) for case, parts in cases_of(ranks)}


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_is_that_of_stock_peft(ranks: int) -> None:
    for errors in run_ranks(_errors, ranks, ranks, timeout=300):
        assert errors and max(errors.values()) < BOUND, errors


MUTATIONS = {
    "second matrices split as queries alone": (
        "model.tensor_parallel.split_modules",
        "elif style == QKV:",
        "elif style == QKV and linear is base:",
    ),
    "first matrices of a part of the rows": (
        "model.tensor_parallel.split_modules",
        "for linear in (base, *first, *second) if style == PARTIAL_GRADIENT else first:",
        "for linear in ():",
    ),
}


def _mutated(rank: int) -> dict[str, float]:
    errors, case = dict[str, float](), Case("qwen2.5-vl", Layout(2), Layout(2, tp=2), 2)
    for name in each_mutated(MUTATIONS):
        try:
            errors[name] = error_of(case, ENCODER)
        except (ModelError, RuntimeError):
            errors[name] = float("inf")
    return errors


@pytest.mark.whole
def test_mutations_are_noticed() -> None:
    for errors in run_ranks(_mutated, 2, timeout=120):
        assert errors.pop("nothing") < BOUND
        assert all(error > 1e-6 for error in errors.values()), errors


# ---- a trained projector, no adapter, and where adapters are

NAME = "qwen3-vl"


def _with_projector_error(rank: int, answer: Answer) -> float:
    def make() -> Any:
        model = tiny(NAME)
        freeze_image_modules(model, "projector")
        return model

    return max(step(Case(NAME, Layout(2), Layout(2), 2), answer, make=make).values())


@pytest.mark.whole
def test_a_frozen_tower_under_a_trained_projector() -> None:
    answer = answer_of(NAME, trained=partial(freeze_image_modules, trained="projector"))
    assert not any(".blocks." in name for name in answer.gradients)
    assert max(run_ranks(_with_projector_error, 2, answer)) < BOUND


@pytest.mark.whole
def test_an_encoders_adapter_is_left_out_too(world: World) -> None:
    documents = documents_of(image_tokens(config_of("qwen2.5-vl")))
    peft_model = adapted("qwen2.5-vl", ENCODER)
    model, bare = (prepare(x, world, encoder=Layout(1)) for x in (peft_model, tiny("qwen2.5-vl")))
    plan = Case("qwen2.5-vl", Layout(1), Layout(1), 1).plan(documents.lengths, documents.targets)
    expected = run_step(bare, plan, documents, world, backward=False).loss
    for left_out in (peft_model.disable_adapter(), disable_adapter(model)):
        with left_out:
            loss = run_step(model, plan, documents, world, backward=False).loss
            with pytest.raises(ModelError, match="the model's adapter is left out"):
                run_step(model, plan, documents, world)
        assert abs(loss / expected - 1) < 1e-12


def test_what_an_encoder_refuses(world: World) -> None:
    for change, message in (
        (lambda module: module.requires_grad_(True), "have adapters, and weights that are trained too"),
        (lambda module: setattr(module, "merged_adapters", ["default"]), "is merged into its weight"),
    ):
        peft_model = adapted("qwen2.5-vl", (TOWER,))
        change(peft_model.get_base_model().model.visual.blocks[0].attn.qkv)
        with pytest.raises(ModelError, match=message):
            prepare(peft_model, world, encoder=Layout(1))

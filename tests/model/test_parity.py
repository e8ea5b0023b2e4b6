"""Qwen3 and Llama under a home equal the stock model that sees documents one by one: logits, loss, every gradient."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from longspan.comm import World, bind
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import Plan, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.stock import error, gradients_of, stock_answer, texts, tiny, worst
from tests.versions import transformers_before

LENGTHS = (13, 1, 30, 7, 2, 18)  # ragged, with documents shorter than 2 cp and one without a target
FAMILIES = ("qwen3", "llama")
KINDS = {torch.float64: ("copies", "sharded", "recomputed"), torch.float32: ("copies", "recomputed")}  # sharded too
Model = tuple[str, torch.dtype, str]
MODELS: list[Model] = [(family, dtype, kind) for family in FAMILIES for dtype, kinds in KINDS.items() for kind in kinds]
IN_CI: list[Model] = [  # families share kinds and types
    ("qwen3", torch.float64, "sharded"),
    ("qwen3", torch.float64, "recomputed"),
    ("qwen3", torch.float32, "copies"),
    ("llama", torch.float64, "sharded"),
]
TYPES = ("p2p", "all_gather")
DEGREES = {3: (3,), 4: (1, 2, 4)}  # by slots
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Errors:
    """Relative to the stock model; the worst of all documents and of all parameters."""

    logits: float
    loss: float
    gradients: float


def _compare(rank: int, slots: int, models: list[Model]) -> dict[tuple[object, ...], Errors]:
    errors = {}
    documents = texts(LENGTHS)
    with World(Layout(ranks=slots), backend=backend()) as world:
        for family, dtype, kind in models:
            stock = stock_answer(family, dtype, documents, world.device)
            model = prepare(
                tiny(family, dtype),
                world,
                shard_parameters=kind != "copies",
                activation_checkpointing=kind == "recomputed",
            )
            for cp, cp_comm_type in product(DEGREES[slots], TYPES):
                plan = plan_fixed(LENGTHS, world.home, cp=cp, cp_comm_type=cp_comm_type)
                logits = _logits(model, plan, documents, world)
                result = run_step(model, plan, documents, world)
                errors[family, dtype, kind, cp, cp_comm_type] = Errors(
                    logits=max(error(logits[d], stock.logits[d]) for d in range(len(LENGTHS))),
                    loss=abs(result.loss - stock.loss) / stock.loss,
                    gradients=worst(gradients_of(model), stock.gradients),
                )
                model.zero_grad()
    return errors


@torch.no_grad()
def _logits(model: torch.nn.Module, plan: Plan, documents: list[np.ndarray], world: World) -> dict[int, torch.Tensor]:
    """Whole logits of every document, on the CPU."""
    logits_of: dict[int, torch.Tensor] = {}
    for micro_batch in plan.micro_batches:
        shard = bind(micro_batch, world).with_padding()
        ids = torch.from_numpy(np.concatenate([documents[d] for d in micro_batch.documents])).to(world.device)
        local = model(input_ids=shard.scatter(ids)[None], position_ids=shard.position_ids[None], shard=shard).logits
        packed = shard.gather(local[0]).cpu()
        logits_of |= dict(zip(micro_batch.documents, packed.split(list(micro_batch.lengths)), strict=True))
    return logits_of


@cache
def _results(slots: int, in_ci: bool) -> list[dict[tuple[object, ...], Errors]]:
    return run_ranks(_compare, slots, slots, [model for model in MODELS if (model in IN_CI) == in_ci])


CASES = [
    pytest.param(slots, cp, *model, cp_comm_type, marks=[] if model in IN_CI else [pytest.mark.whole])
    for slots, degrees in DEGREES.items()
    for cp, model, cp_comm_type in product(degrees, MODELS, TYPES)
]


@pytest.mark.parametrize(("slots", "cp", "family", "dtype", "kind", "cp_comm_type"), CASES)
def test_equals_the_stock_model(
    slots: int, cp: int, family: str, dtype: torch.dtype, kind: str, cp_comm_type: str
) -> None:
    for of_case in (
        errors[family, dtype, kind, cp, cp_comm_type] for errors in _results(slots, (family, dtype, kind) in IN_CI)
    ):
        assert max(of_case.logits, of_case.gradients) < TOLERANCE[dtype], of_case
        assert of_case.loss < (1e-12 if dtype == torch.float64 else 1e-6), of_case


def _other_families(rank: int) -> dict[str, float]:
    errors, documents = {}, texts(LENGTHS)
    with World(Layout(ranks=2), backend=backend()) as world:
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        for family in ("mistral", "gemma2", *(() if transformers_before("5.24") else ("gpt-j", "codegen"))):
            stock = stock_answer(family, torch.float32, documents, world.device)
            model = prepare(tiny(family, attention="eager"), world)
            loss = run_step(model, plan, documents, world).loss
            errors[family] = max(abs(loss / stock.loss - 1), worst(gradients_of(model), stock.gradients))
    return errors


def test_windows_and_soft_caps_and_tables_of_angles_of_other_families() -> None:
    for errors in run_ranks(_other_families, 2):
        assert max(errors.values()) < 1e-5, errors

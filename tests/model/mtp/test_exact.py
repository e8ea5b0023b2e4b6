"""Loss, the loss of every depth and every gradient of a step, as one process makes them document by document."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from longspan import (
    Document,
    DocumentLoss,
    Layout,
    MtpLoss,
    Plan,
    World,
    plan_dynamic,
    plan_fixed,
    plan_padded,
    prepare,
    run_step,
)
from longspan.doctor.stock import whole_float64
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.testing import run_ranks
from tests.model.mtp.as_called import dense_as_called
from tests.model.mtp.dense import AS_CALLED, LENGTHS, WEIGHT, Answer, dense, with_depths
from tests.model.stock import gradients_of, texts, worst

EXACT = 1e-11


@dataclass(frozen=True)
class Case:
    """A model with depths, and how it is prepared."""

    family: str = "qwen3"
    depths: int = 2
    labelled: bool = False
    layers: int = 2
    settings: tuple[tuple[str, Any], ...] = ()
    plans: tuple[str, ...] = ()  # none: all


FEW = [Case(), Case(depths=3)]
FAMILIES = [
    Case("llama", depths=1, settings=(("activation_checkpointing", "full"),)),
    Case("mistral"),
    Case("gemma2"),
    Case("deepseek-v3"),
    Case("qwen3-moe", layers=3),
]
SETTINGS = [
    Case(labelled=True),
    Case(settings=(("shard_parameters", False),)),
    Case(settings=(("activation_checkpointing", "selective"), ("offload_activations", True))),
    Case(settings=(("probe", False), ("reshard_after_forward", False))),
]
HYBRID = [
    Case("qwen3-next, a scan last", plans=("one cp", "dynamic")),
    Case("bamba, a scan last", settings=(("activation_checkpointing", "full"),)),
    Case("qwen3-next", depths=1, labelled=True),
    Case("nemotron-h", plans=("one cp", "dynamic")),
]
_ROWS, _TWO = (("sequence_parallel", True),), ("one cp", "dynamic")
ROWS = [
    Case(settings=_ROWS, plans=_TWO),
    Case("qwen3-moe", layers=3, settings=(*_ROWS, ("activation_checkpointing", "full")), plans=_TWO),
]
GEMMA = Case("gemma4, keys shared", depths=1, plans=("dynamic",))
_SEVERAL = [Case("nemotron-h", depths=1)]  # layers of a depth
# Layers that get what is made of the rows' tokens.
_FULL = ("activation_checkpointing", "full")
OF_TOKENS = [
    Case("zamba2", settings=(_FULL,), plans=("one cp", "padded", "dynamic")),
    Case("gemma4, keys shared", settings=(_FULL,)),
    Case("gemma4", labelled=True),
    Case("gemma4, experts", depths=1, plans=_TWO),
    Case("zamba2", depths=1, labelled=True, settings=(("shard_parameters", False),), plans=_TWO),
]
OF_TOKENS_SPLIT = [
    Case("zamba2", plans=_TWO),
    Case("zamba2", settings=(*_ROWS, _FULL), plans=_TWO),
    Case("gemma4, keys shared", plans=_TWO),
    Case("gemma4", depths=1, settings=(_FULL,), plans=_TWO),
]
OF_TOKENS_STAGES = [
    Case("zamba2", plans=_TWO),
    Case("zamba2", settings=(_FULL, ("pipeline_schedule", "zbv"), ("virtual_stages", 2)), plans=_TWO),
    Case("zamba2", depths=1, settings=(("pipeline_schedule", "zero_bubble"), ("shard_parameters", False)), plans=_TWO),
]
SPLIT = [
    Case(),
    Case("llama", settings=(("shard_parameters", False),)),
    Case("deepseek-v3", depths=1, settings=(("activation_checkpointing", "full"),)),
    Case("qwen3-moe", layers=3),
]
EXPERTS = [
    Case("qwen3-moe", layers=3),
    Case("qwen3-moe", depths=1, layers=3, settings=(("activation_checkpointing", "selective"),)),
]
STAGES = [
    Case(),
    Case("llama", labelled=True, settings=(("shard_parameters", False),)),
    Case("llama", layers=4, settings=(("pipeline_schedule", "zero_bubble"), ("virtual_stages", 2))),
    Case(layers=4, settings=(("pipeline_schedule", "zbv"), ("virtual_stages", 2))),
    Case("llama", layers=4, settings=(("pipeline_schedule", "zbv"), ("virtual_stages", 2))),
    Case("llama", settings=(("activation_checkpointing", "full"), ("pipeline_schedule", "gpipe"))),
    Case("qwen3-moe", layers=3),
]


def _plans(home: Layout, targets: int, multiple: int) -> dict[str, Plan]:
    """`multiple`: what a slot's rows are a multiple of."""
    each: dict[str, Any] = {"targets": targets, "row_multiple": multiple}
    rows: dict[str, Any] = {"max_tokens_per_slot": 32, **each}
    few: dict[str, Any] = {"max_tokens_per_slot": max(10, 30 // home.slots + 4), **each}
    makers: dict[str, Callable[[], Plan]] = {
        "cp 1": lambda: plan_fixed(LENGTHS, home, cp=1, **rows),
        "one cp": lambda: plan_fixed(LENGTHS, home, cp=home.slots, **few),
        "all_gather": lambda: plan_fixed(LENGTHS, home, cp=home.slots, cp_comm_type="all_gather", **each),
        "padded": lambda: plan_padded(LENGTHS, home, cp=home.slots, **rows),
        "dynamic": lambda: plan_dynamic(LENGTHS, home, **few),
        "free": lambda: plan_dynamic(LENGTHS, home, mode="free", **few),
    }
    if home.pp > 1 or home.ep > 1:
        makers.pop("free")  # refused
    return {name: make() for name, make in makers.items()}


def _holds_the_end(model: Any) -> bool:
    return not isinstance(model, PipelineModel) or any(stage.last for stage in model.stages)


def _masks(case: Case) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.random(n) < 0.6 if case.labelled else np.ones(n, dtype=bool) for n in LENGTHS]


def _weights(case: Case) -> list[float]:
    return [0.5 + i if case.labelled else 1.0 for i in range(len(LENGTHS))]


@cache
def wanted(case: Case) -> Answer:
    """What one process says."""
    with whole_float64():
        reference = dense_as_called if case.family in AS_CALLED else dense
        model = with_depths(case.family, case.depths, case.layers).train()
        return reference(model, texts(LENGTHS), _masks(case), _weights(case))


def documents_of(case: Case) -> list[Any]:
    """The documents, with labels and weights where the case has them."""
    ids = texts(LENGTHS)
    if not case.labelled:
        return list(ids)
    pairs = zip(ids, _masks(case), _weights(case), strict=True)
    return [Document(tokens, loss_mask=mask, weights=weight) for tokens, mask, weight in pairs]


def _errors(rank: int, home: Layout, cases: list[Case]) -> dict[str, float]:
    """The largest relative error of each case and plan."""
    errors, mtp = dict[str, float](), MtpLoss(weight=WEIGHT)
    with World(home) as world, whole_float64():
        for case in cases:
            exact, documents = wanted(case), documents_of(case)
            targets = sum(int(mask[1:].sum()) for mask in _masks(case))
            model = prepare(with_depths(case.family, case.depths, case.layers), world, **dict(case.settings))
            multiple = home.tp if "sequence_parallel" in dict(case.settings) else 1
            for name, plan in _plans(world.home, targets, multiple).items():
                if case.plans and name not in case.plans:
                    continue
                result = run_step(model, plan, documents, world, mtp=mtp)
                pairs = zip((result.loss, *result.mtp_losses), (exact.loss, *exact.mtp_losses), strict=True)
                losses = max(abs(loss / max(loss_there, 1e-30) - 1) for loss, loss_there in pairs)
                gradients = gradients_of(model)
                here = exact.gradients if home.pp == 1 else {n: x for n, x in exact.gradients.items() if n in gradients}
                assert any(name.startswith("mtp.") for name in gradients) == _holds_the_end(model)
                errors[f"{case}, {name}"] = max(losses, worst(gradients, here))
                model.zero_grad()
                seen = run_step(model, plan, documents, world, backward=False, mtp=mtp)
                assert seen.mtp_losses == pytest.approx(exact.mtp_losses, rel=EXACT), (case, name, seen, exact, result)
            without = run_step(model, plan, documents, world)
            if without.router and result.router:  # routers of depths are not counted
                assert tuple(without.router) == pytest.approx(tuple(result.router), rel=EXACT)
            assert without.mtp_losses == () and without.loss == pytest.approx(exact.loss, rel=EXACT)
            found = [name for name in gradients_of(model) if name.startswith("mtp.")]
            assert not found, (case, found)
    return errors


@pytest.mark.parametrize(
    ("home", "cases"),
    [
        pytest.param(Layout(ranks=1), FEW[1:], marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2), FEW, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2), FAMILIES, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2), SETTINGS, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=3), FEW[1:], marks=pytest.mark.whole),
        (Layout(ranks=2), [Case("qwen3-next, a scan last", plans=("dynamic",)), GEMMA]),
        pytest.param(Layout(ranks=3), HYBRID, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, dp_replicate=2), FEW, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=4, tp=2), SPLIT + _SEVERAL, marks=pytest.mark.whole),
        (Layout(ranks=2, tp=2), ROWS[1:]),
        pytest.param(Layout(ranks=2, tp=2), ROWS[:1], marks=pytest.mark.whole),
        pytest.param(Layout(ranks=4, tp=2, pp=2), ROWS + _SEVERAL, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, ep=2), EXPERTS[:1] + _SEVERAL, marks=pytest.mark.whole),
        (Layout(ranks=2, pp=2), STAGES[4:5]),
        pytest.param(Layout(ranks=2, pp=2), STAGES, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=4, pp=2), STAGES, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2), OF_TOKENS, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=3), OF_TOKENS[:2], marks=pytest.mark.whole),
        pytest.param(Layout(ranks=4, tp=2), OF_TOKENS_SPLIT, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=2, pp=2), OF_TOKENS_STAGES, marks=pytest.mark.whole),
        pytest.param(Layout(ranks=4, tp=2, pp=2), OF_TOKENS_SPLIT[1:2], marks=pytest.mark.whole),
    ],
    ids=[
        "1 slot",
        "2 slots",
        "families on 2 slots",
        "settings on 2 slots",
        "3 slots",
        "a hybrid and inputs of tokens on 2 slots",
        "hybrids on 3 slots",
        "2 replicas",
        "2 slots of tp 2",
        "rows and experts split over tp 2",
        "rows split over tp 2",
        "2 stages of rows split over tp 2",
        "2 slots of ep 2",
        "2 stages",
        "2 stages, all",
        "2 slots of 2 stages",
        "inputs of tokens on 2 slots",
        "inputs of tokens on 3 slots",
        "inputs of tokens on 2 slots of tp 2",
        "inputs of tokens in 2 stages",
        "inputs of tokens in 2 stages of rows split over tp 2",
    ],
)
def test_every_plan_gives_the_losses_and_gradients_of_one_process(home: Layout, cases: list[Case]) -> None:
    ranks = home.ranks if isinstance(home.ranks, int) else len(home.ranks)
    for errors in run_ranks(_errors, ranks, home, cases, timeout=280):
        assert all(error <= EXACT for error in errors.values()), {k: e for k, e in errors.items() if not e <= EXACT}


def _own_losses(rank: int) -> dict[str, float]:
    """Errors where the loss of the next token is written by the caller, and sums that are looked up ahead."""
    case, errors = Case(), dict[str, float]()
    with World(Layout(ranks=2)) as world, whole_float64():
        exact, documents = wanted(case), documents_of(case)
        model = prepare(with_depths(case.family, case.depths), world)
        plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=24)
        of_documents = DocumentLoss(lambda sums, _: -sums.sum())  # one set of documents in several micro-batches
        losses: dict[str, Any] = {"of tokens": lambda log_probs, at: -log_probs, "of documents": of_documents}
        for name, loss in losses.items():
            settings: dict[str, Any] = {"loss": loss, "divisor": plan.targets, "loss_chunk_rows": 5}
            result = run_step(model, plan, documents, world, mtp=MtpLoss(weight=WEIGHT), **settings)
            assert result.mtp_losses == pytest.approx(exact.mtp_losses, rel=EXACT)
            errors[name] = max(abs(result.loss / exact.loss - 1), worst(gradients_of(model), exact.gradients))
            model.zero_grad()
    return errors


def test_a_loss_of_ones_own_is_that_of_the_next_token() -> None:
    for errors in run_ranks(_own_losses, 2):
        assert max(errors.values()) < EXACT, errors


def _in_bfloat16(rank: int) -> tuple[float, ...]:
    """Losses in float32, then in bfloat16 over float32 parameters."""
    with World(Layout(ranks=2)) as world:
        plan, losses = plan_fixed(LENGTHS, world.home, cp=2), list[float]()
        for dtype in (None, torch.bfloat16):
            model = prepare(with_depths("qwen3", 2).float(), world, compute_dtype=dtype)
            result = run_step(model, plan, texts(LENGTHS), world, mtp=MtpLoss(weight=WEIGHT))
            losses += [result.loss, *result.mtp_losses]
            assert all(gradient.dtype == torch.float32 for gradient in gradients_of(model).values())
    return tuple(losses)


def test_depths_compute_in_the_type_of_the_layers() -> None:
    losses = run_ranks(_in_bfloat16, 2)[0]
    assert losses[3:] == pytest.approx(losses[:3], rel=2e-2) and losses[3:] != losses[:3]

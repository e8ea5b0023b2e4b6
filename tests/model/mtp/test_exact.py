"""Loss, the loss of every depth and every gradient of a step, as one process makes them document by document."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from longspan import Document, DocumentLoss, Layout, World, prepare, run_step
from longspan.doctor.stock import compute_in_float64
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.mtp import MtpLoss
from longspan.plan import Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import run_ranks
from tests.model.mtp.dense import LENGTHS, WEIGHT, Answer, adapted, dense, with_depths
from tests.model.stock import gradients_of, prepare_untried, texts
from tests.mutation import each_mutated

EXACT = 1e-11


@dataclass(frozen=True)
class Case:
    family: str = "qwen3"
    depths: int = 2
    labelled: bool = False
    layers: int = 2
    settings: tuple[tuple[str, Any], ...] = ()
    plans: tuple[str, ...] = ()  # none: all
    adapter: tuple[tuple[str, Any], ...] | None = None
    tried: bool = True  # by trials of rows, which take as long as two steps


OF_SLOTS = [
    Case(),
    Case(depths=3),
    Case("llama", depths=1, settings=(("activation_checkpointing", "full"),)),
    Case("mistral"),
    Case("gemma2"),
    Case("deepseek-v3"),
    Case("qwen3-moe", layers=3),
    Case(labelled=True),
    Case(settings=(("shard_parameters", False),)),
    Case(settings=(("activation_checkpointing", "selective"), ("offload_activations", True))),
    Case(settings=(("reshard_after_forward", False),)),
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
_SEVERAL = [Case("nemotron-h", depths=1)]  # layers of a depth
_FULL = ("activation_checkpointing", "full")
SPLIT = [
    Case(),
    Case("llama", settings=(("shard_parameters", False),)),
    Case("deepseek-v3", depths=1, settings=(("activation_checkpointing", "full"),)),
    Case("qwen3-moe", layers=3),
]
EXPERTS = [Case("qwen3-moe", depths=1, layers=3, settings=(("activation_checkpointing", "selective"),))]
STAGES = [
    Case("llama", labelled=True, settings=(("shard_parameters", False),)),
    Case("llama", layers=4, settings=(("pipeline_schedule", "zero_bubble"), ("virtual_stages", 2))),
    Case("llama", layers=4, settings=(("activation_checkpointing", "full"), ("virtual_stages", 2))),
    Case("qwen3-moe", layers=3),
]


def _adapted(*settings: tuple[str, Any]) -> list[Case]:
    """Depths with adapters of their own, and depths that are trained whole."""
    families, trained = ("qwen3", "bamba, a scan last"), ((), (("modules_to_save", ("mtp",)),))
    return [Case(f, settings=settings, plans=_TWO, adapter=adapter) for f in families for adapter in trained]


IN_CI: dict[str, tuple[Layout, list[Case]]] = {  # stages: tests/run/runs/test_mtp_run.py
    "a hybrid on 2 slots": (Layout(2), [Case("qwen3-next, a scan last", plans=("dynamic",), tried=False)]),
    "rows and experts split over tp 2": (Layout(2, tp=2), [replace(ROWS[1], plans=("all_gather",), tried=False)]),
}
TABLE: dict[str, tuple[Layout, list[Case]]] = {
    "2 slots": (Layout(2), OF_SLOTS),
    "hybrids on 3 slots": (Layout(3), HYBRID),
    "2 replicas": (Layout(2, dp_replicate=2), OF_SLOTS[1:2]),
    "2 slots of tp 2": (Layout(4, tp=2), SPLIT + _SEVERAL),
    "2 stages of rows split over tp 2": (Layout(4, tp=2, pp=2), ROWS + _SEVERAL),
    "2 slots of ep 2": (Layout(2, ep=2), EXPERTS + _SEVERAL),
    "2 slots of 2 stages": (Layout(4, pp=2), STAGES),
    "adapters and cp 2": (Layout(2), _adapted(_FULL)),
    "adapters and rows split over tp 2": (Layout(2, tp=2), _adapted(*_ROWS)),
    "adapters and pp 2": (Layout(2, pp=2), _adapted()),
}


def _plans(home: Layout, targets: int, multiple: int) -> dict[str, Plan]:
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


def _masks(case: Case) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.random(n) < 0.6 if case.labelled else np.ones(n, dtype=bool) for n in LENGTHS]


def _weights(case: Case) -> list[float]:
    return [0.5 + i if case.labelled else 1.0 for i in range(len(LENGTHS))]


def _model(case: Case) -> Any:
    model = with_depths(case.family, case.depths, case.layers)
    return model if case.adapter is None else adapted(model, **{name: [*x] for name, x in case.adapter})


@cache
def _wanted(case: Case) -> Answer:
    with compute_in_float64():
        return dense(_model(case).train(), texts(LENGTHS), _masks(case), _weights(case))


Rows = list[tuple[Layout, list[Case]]]


def _wanted_in_a_fresh_process(rank: int, case: Case) -> Answer:
    """A model made before it in a process changes what transformers' Bamba answers."""
    return _wanted(case)


def _errors(rank: int, rows: Rows, wanted: dict[Case, Answer]) -> dict[str, float]:
    return {name: e for home, cases in rows for name, e in _errors_in(home, cases, wanted).items()}


def _errors_in(home: Layout, cases: list[Case], wanted: dict[Case, Answer]) -> dict[str, float]:
    errors, mtp = dict[str, float](), MtpLoss(weight=WEIGHT)
    with World(home) as world, compute_in_float64():
        for case in cases:
            exact, masks, documents = wanted[case], _masks(case), list[Any](texts(LENGTHS))
            if case.labelled:
                labels = zip(documents, masks, _weights(case), strict=True)
                documents = [Document(ids, loss_mask=mask, weights=weight) for ids, mask, weight in labels]
            make, settings = prepare if case.tried else prepare_untried, dict(case.settings)
            model = make(_model(case), world, **settings)
            multiple = home.tp if "sequence_parallel" in settings else 1
            for name, plan in _plans(home, sum(int(mask[1:].sum()) for mask in masks), multiple).items():
                if case.plans and name not in case.plans:
                    continue
                result = run_step(model, plan, documents, world, mtp=mtp)
                gradients = gradients_of(model)
                holds_the_end = not isinstance(model, PipelineModel) or any(stage.last for stage in model.stages)
                assert any(name.startswith("mtp.") for name in gradients) == holds_the_end
                assert case.adapter != () or all(".lora_" in name for name in gradients)
                errors[f"{case}, {name}"] = exact.error(result, gradients, in_part=home.pp > 1)
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


TABLES = {"few": [*IN_CI.values()]} | {name: [row] for name, row in TABLE.items()}


@pytest.mark.parametrize(
    "rows", [pytest.param(r, id=n, marks=[pytest.mark.whole] * (n != "few")) for n, r in TABLES.items()]
)
def test_every_plan_gives_the_losses_and_gradients_of_one_process(rows: Rows) -> None:
    wanted = {
        case: run_ranks(_wanted_in_a_fresh_process, 1, case)[0] if "bamba" in case.family else _wanted(case)
        for _, cases in rows
        for case in cases
    }
    for errors in run_ranks(_errors, len(rows[0][0].ranks), rows, wanted, timeout=280):
        assert errors and all(error <= EXACT for error in errors.values()), errors


def _own_losses_and_types(rank: int, exact: Answer) -> tuple[dict[str, float], list[float]]:
    """Errors where the loss of the next token is written by the caller; losses in float32 and in bfloat16."""
    errors, of_types = dict[str, float](), list[float]()
    with World(Layout(ranks=2)) as world:
        plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=24)
        of_documents = DocumentLoss(lambda sums, _: -sums.sum())  # one set of documents in several micro-batches
        losses: dict[str, Any] = {"of tokens": lambda log_probs, at: -log_probs, "of documents": of_documents}
        with compute_in_float64():
            model = prepare_untried(with_depths("qwen3", 2), world)
            for name, loss in losses.items():
                settings: dict[str, Any] = {"loss": loss, "divisor": plan.targets, "loss_chunk_rows": 5}
                result = run_step(model, plan, texts(LENGTHS), world, mtp=MtpLoss(weight=WEIGHT), **settings)
                errors[name] = exact.error(result, gradients_of(model))
                model.zero_grad()
        for dtype in (None, torch.bfloat16):
            model = prepare_untried(with_depths("qwen3", 2).float(), world, compute_dtype=dtype)
            result = run_step(model, plan, texts(LENGTHS), world, mtp=MtpLoss(weight=WEIGHT))
            of_types += [result.loss, *result.mtp_losses]
            assert all(gradient.dtype == torch.float32 for gradient in gradients_of(model).values())
    return errors, of_types


def test_losses_of_ones_own_and_depths_compute_in_the_type_of_the_layers() -> None:
    for errors, losses in run_ranks(_own_losses_and_types, 2, _wanted(Case())):
        assert max(errors.values()) < EXACT, errors
        assert losses[3:] == pytest.approx(losses[:3], rel=2e-2) and losses[3:] != losses[:3]


# ---- what could go wrong without an error, put into the code

READ, LOSS = "train.rows.read_rows", "train.terms.mtp"
DEPTHS = "model.mtp.depths"
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "ids shifted by one less": (READ, "tokens[ahead]", "tokens[max(depth - 1, 0) :][: stop - start]"),
    "labels shifted by one less": (READ, "labels[ahead]", "labels[max(depth - 1, 0) :][: stop - start]"),
    "ids of the segment alone": (READ, "stop + len(self.at_depth)", "stop + 1"),
    "ids over the ends of segments and documents": (
        "train.passes",
        "np.stack([rows.ids for rows in batch.deeper])",
        "np.stack([np.roll(batch.ids, -1 - depth) for depth in range(passes.depths)])",
    ),
    "labels over the ends of segments and documents": (
        LOSS,
        "self._cross_entropy(rows, states",
        "self._cross_entropy(rows._replace(labels=__import__('numpy').roll(batch.labels, -1 - depth)), states",
    ),
    "targets of every token": (LOSS, "(batch.deeper[d].labels != NO_TARGET).sum()", "len(batch.labels)"),
    "targets of this slot": (
        LOSS,
        'world.control.sum_over_stages(local, "targets of multi-token prediction")',
        "local",
    ),
    "the depths' sum in place of their mean": (LOSS, "mtp.weight / len(targets)", "mtp.weight"),
    "not multiplied by what the sum is divided by": (LOSS, "* divisor / max", "/ max"),
    "depths in the loss": (LOSS, "share * (loss - loss.detach())", "share * loss"),
    "every depth from the model's hidden states": (DEPTHS, "        hidden = depth(", "        last = depth("),
    "the hidden states first": (
        DEPTHS,
        "[self.enorm(embedded), self.hnorm(hidden)]",
        "[self.hnorm(hidden), self.enorm(embedded)]",
    ),
    "no last norm": (DEPTHS, "self.post_norm(take_hidden_states(", "(take_hidden_states("),
}

OF_WHOLE_DEPTHS: dict[str, tuple[str, str, str]] = {  # beside an adapter
    "the depths that were there before": (DEPTHS, "model._modules[MTP] = copies[0]", "pass"),
    "a configuration of their own": (DEPTHS, "copies[0].get_submodule(name).config = config", "pass"),
}


def _mutated_errors(rank: int, family: str, mutations: dict[str, tuple[str, str, str]]) -> dict[str, float]:
    """The largest error of a step by what is wrong; of a change that raises, infinity."""
    errors, documents = dict[str, float](), texts(LENGTHS)

    def make() -> Any:
        model = with_depths(family, 2)
        return adapted(model, modules_to_save=["mtp"]) if mutations.keys() == OF_WHOLE_DEPTHS.keys() else model

    with World(Layout(ranks=2)) as world, compute_in_float64():
        exact = dense(make().train(), documents)
        plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=24)
        for name in each_mutated(mutations):
            try:
                model = prepare_untried(make(), world)
                result = run_step(model, plan, documents, world, mtp=MtpLoss(weight=WEIGHT))
                errors[name] = exact.error(result, gradients_of(model))
            except Exception:  # of both ranks, before a collective
                errors[name] = math.inf
    return errors


@pytest.mark.whole
@pytest.mark.parametrize(("family", "mutations"), [("qwen3", MUTATIONS), ("qwen3", OF_WHOLE_DEPTHS)])
def test_mutations_are_noticed(family: str, mutations: dict[str, tuple[str, str, str]]) -> None:
    for errors in run_ranks(_mutated_errors, 2, family, mutations, timeout=280):
        assert errors.pop("nothing") < 1e-11
        assert all(error > 1e-6 for error in errors.values()), errors

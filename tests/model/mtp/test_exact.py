"""Loss, the loss of every depth and every gradient of a step, as one process makes them document by document."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.census.models import default_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan import Document, DocumentLoss, Layout, MtpLoss, World, prepare, run_step
from longspan.doctor.stock import whole_float64
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.plan import Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import run_ranks
from tests.model.mtp.dense import LENGTHS, WEIGHT, Answer, adapted, add_drawn_depths, dense, with_depths
from tests.model.stock import gradients_of, prepare_untried, texts
from tests.versions import transformers_before

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


def _adapted(*settings: tuple[str, Any]) -> list[Case]:
    """Depths with adapters of their own, and depths that are trained whole."""
    families, trained = ("qwen3", "bamba, a scan last", "zamba2"), ((), (("modules_to_save", ("mtp",)),))
    return [Case(f, settings=settings, plans=_TWO, adapter=adapter) for f in families for adapter in trained]


IN_CI: dict[str, tuple[Layout, list[Case]]] = {
    "a hybrid and inputs of tokens on 2 slots": (
        Layout(2),
        [
            Case("qwen3-next, a scan last", plans=("dynamic",), tried=False),
            Case("gemma4, keys shared", depths=1, plans=("dynamic",), tried=False),
        ],
    ),
    "rows and experts split over tp 2": (Layout(2, tp=2), [replace(ROWS[1], plans=("dynamic",))]),
    "2 stages": (Layout(2, pp=2), [replace(STAGES[4], plans=("padded", "dynamic"))]),
}
TABLE: dict[str, tuple[Layout, list[Case]]] = IN_CI | {
    "1 slot": (Layout(1), FEW[1:]),
    "2 slots": (Layout(2), FEW),
    "families on 2 slots": (Layout(2), FAMILIES),
    "settings on 2 slots": (Layout(2), SETTINGS),
    "3 slots": (Layout(3), FEW[1:]),
    "hybrids on 3 slots": (Layout(3), HYBRID),
    "2 replicas": (Layout(2, dp_replicate=2), FEW),
    "2 slots of tp 2": (Layout(4, tp=2), SPLIT + _SEVERAL),
    "rows split over tp 2": (Layout(2, tp=2), ROWS[:1]),
    "2 stages of rows split over tp 2": (Layout(4, tp=2, pp=2), ROWS + _SEVERAL),
    "2 slots of ep 2": (Layout(2, ep=2), EXPERTS[:1] + _SEVERAL),
    "2 stages, all": (Layout(2, pp=2), STAGES),
    "2 slots of 2 stages": (Layout(4, pp=2), STAGES),
    "inputs of tokens on 2 slots": (Layout(2), OF_TOKENS),
    "inputs of tokens on 3 slots": (Layout(3), OF_TOKENS[:2]),
    "inputs of tokens on 2 slots of tp 2": (Layout(4, tp=2), OF_TOKENS_SPLIT),
    "inputs of tokens in 2 stages": (Layout(2, pp=2), OF_TOKENS_STAGES),
    "inputs of tokens in 2 stages of rows split over tp 2": (Layout(4, tp=2, pp=2), OF_TOKENS_SPLIT[1:2]),
    "adapters and cp 2": (Layout(2), _adapted(_FULL)),
    "adapters and rows split over tp 2": (Layout(2, tp=2), _adapted(*_ROWS)),
    "adapters and tp 2": (Layout(2, tp=2), _adapted(("shard_parameters", False))),
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


def _holds_the_end(model: Any) -> bool:
    return not isinstance(model, PipelineModel) or any(stage.last for stage in model.stages)


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
    with whole_float64():
        return dense(_model(case).train(), texts(LENGTHS), _masks(case), _weights(case))


def _errors(rank: int, home: Layout, cases: list[Case]) -> dict[str, float]:
    """The largest relative error of each case and plan."""
    errors, mtp = dict[str, float](), MtpLoss(weight=WEIGHT)
    with World(home) as world, whole_float64():
        for case in cases:
            exact, masks, documents = _wanted(case), _masks(case), list[Any](texts(LENGTHS))
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
                assert any(name.startswith("mtp.") for name in gradients) == _holds_the_end(model)
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


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole] * (n not in IN_CI)) for n in TABLE])
def test_every_plan_gives_the_losses_and_gradients_of_one_process(name: str) -> None:
    home, cases = TABLE[name]
    for errors in run_ranks(_errors, len(home.ranks), home, cases, timeout=280):
        assert errors and all(error <= EXACT for error in errors.values()), errors


def _own_losses(rank: int, exact: Answer) -> dict[str, float]:
    """Errors where the loss of the next token is written by the caller, and sums that are looked up ahead."""
    errors = dict[str, float]()
    with World(Layout(ranks=2)) as world, whole_float64():
        model = prepare_untried(with_depths("qwen3", 2), world)
        plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=24)
        of_documents = DocumentLoss(lambda sums, _: -sums.sum())  # one set of documents in several micro-batches
        losses: dict[str, Any] = {"of tokens": lambda log_probs, at: -log_probs, "of documents": of_documents}
        for name, loss in losses.items():
            settings: dict[str, Any] = {"loss": loss, "divisor": plan.targets, "loss_chunk_rows": 5}
            result = run_step(model, plan, texts(LENGTHS), world, mtp=MtpLoss(weight=WEIGHT), **settings)
            errors[name] = exact.error(result, gradients_of(model))
            model.zero_grad()
    return errors


def test_a_loss_of_ones_own_is_that_of_the_next_token() -> None:
    for errors in run_ranks(_own_losses, 2, _wanted(Case())):
        assert max(errors.values()) < EXACT, errors


def _in_bfloat16(rank: int) -> tuple[float, ...]:
    with World(Layout(ranks=2)) as world:
        plan, losses = plan_fixed(LENGTHS, world.home, cp=2), list[float]()
        for dtype in (None, torch.bfloat16):
            model = prepare_untried(with_depths("qwen3", 2).float(), world, compute_dtype=dtype)
            result = run_step(model, plan, texts(LENGTHS), world, mtp=MtpLoss(weight=WEIGHT))
            losses += [result.loss, *result.mtp_losses]
            assert all(gradient.dtype == torch.float32 for gradient in gradients_of(model).values())
    return tuple(losses)


def test_depths_compute_in_the_type_of_the_layers() -> None:
    losses = run_ranks(_in_bfloat16, 2)[0]
    assert losses[3:] == pytest.approx(losses[:3], rel=2e-2) and losses[3:] != losses[:3]


SMALL_SHARE = 1e-3  # biases of keys have gradients of nothing but rounding
ELSEWHERE = ("gemma3n_text", "nemotron_h")  # in `test_add.py`, which says why, and `test_exact.py`
CENSUS = json.loads((Path(__file__).parents[3] / "bench/records/census.json").read_text())["models"]
# In transformers 5.17: experts without a meta forward or random values, no small copy, no mask without a padding mask.
LATER = ("aria_text", "cohere_compass_text", "dbrx", "deepseek_v3", "ernie4_5_moe", "moshi")
NAMES = [
    name
    for name, model in CENSUS.items()
    if model["status"] == "exact"
    and name.partition("+")[0] in CONFIG_MAPPING
    and name not in ELSEWHERE
    and not (name in LATER and transformers_before("5.23"))
]
A_RUN = 8
SHORT = (13, 1, 5, 2)


def _census_model(name: str) -> Any:
    tiny = make_tiny_model(shrink_configuration(default_config(name)), torch.float64, attention="eager")
    return add_drawn_depths(tiny, 2).train()


def _census_error(result: Any, gradients: dict[str, torch.Tensor], exact: Answer) -> float:
    assert gradients.keys() == exact.gradients.keys(), sorted(gradients.keys() ^ exact.gradients.keys())[:4]
    pairs = zip((result.loss, *result.mtp_losses), (exact.loss, *exact.mtp_losses), strict=True)
    least = SMALL_SHARE * float(torch.stack([x.norm() for x in exact.gradients.values()]).norm())
    of_gradients = [(gradients[n] - x).norm() / max(float(x.norm()), least) for n, x in exact.gradients.items()]
    return float(max(*(abs(loss / there - 1) for loss, there in pairs), *of_gradients))


def _census_errors(rank: int, names: Sequence[str]) -> dict[str, float]:
    documents, errors = [np.arange(n) * 7 % 40 + 3 for n in SHORT], dict[str, float]()
    with World(Layout(ranks=2)) as world, whole_float64():
        for name in names:
            exact, model = dense(_census_model(name), documents), prepare(_census_model(name), world)
            result = run_step(model, plan_fixed(SHORT, world.home, cp=2), documents, world, mtp=MtpLoss(WEIGHT))
            errors[name] = _census_error(result, gradients_of(model), exact)
    return errors


@pytest.mark.whole
@pytest.mark.parametrize("first", range(0, len(NAMES), A_RUN), ids=lambda first: NAMES[first])
def test_depths_behind_a_family_are_exact(first: int) -> None:
    names = NAMES[first : first + A_RUN]
    for errors in run_ranks(_census_errors, 2, names, timeout=590):
        assert all(errors[name] < EXACT for name in names), errors

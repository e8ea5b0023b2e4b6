"""Adapters of peft under every home equal the dense PeftModel: loss, every gradient, and the base model alone.

Adapters of mixers are those of the projections of gated delta nets, Mamba 2 and the like.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from torch import Tensor

from longspan.comm import World
from longspan.doctor.stock import compute_in_float64
from longspan.layout import Layout
from longspan.model import disable_adapter, prepare
from longspan.model.adapted_modules import peft_modules
from longspan.model.kinds import find_mixers
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step, token_log_probs
from tests.model.lora.adapted import LENGTHS, OTHER_HYBRIDS, adapted, dense_answer
from tests.model.seams.families import MANY_HEADS, here as indexed_here
from tests.model.seams.test_mixers import here
from tests.model.stock import error, gradients_of, prepare_untried, texts
from tests.mutation import Change, mutated


@dataclass(frozen=True)
class Home:
    """A layout, how a model is prepared for it, and how documents are planned."""

    layout: Layout
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dynamic: bool = False
    mode: Literal["lockstep", "free"] = "lockstep"
    partition: Literal["zigzag", "contiguous"] = "zigzag"

    def plan(self) -> Plan:
        if self.dynamic:
            return plan_dynamic(LENGTHS, self.layout, max_tokens_per_slot=22, mode=self.mode)
        multiple = self.layout.tp if self.partition == "contiguous" or "sequence_parallel" in self.options else 1
        rows: dict[str, Any] = {"row_multiple": multiple, "partition": self.partition}
        return plan_fixed(LENGTHS, self.layout, cp=self.layout.slots, max_tokens_per_slot=40, **rows)


Exact = tuple[float, float, dict[str, Tensor]]


def errors_of(
    home: Home,
    family: str,
    adapter: str,
    world: World,
    exact: Exact,
    *,
    trial: bool = False,
    base: bool = True,
    make: Callable[..., Any] = adapted,
) -> dict[str, float]:
    loss, base_loss, gradients = exact
    peft_model, plan, documents, errors = make(family, adapter), home.plan(), texts(LENGTHS), dict[str, float]()
    mixers = tuple(f"{name}." for name in find_mixers(peft_model.get_base_model()))
    assert not mixers or any(key.startswith(mixers) for key in gradients)
    model = (prepare if trial else prepare_untried)(peft_model, world, **home.options)
    if base:
        with disable_adapter(model):
            reference = -token_log_probs(model, plan, documents, world).sums.sum() / plan.targets
        errors["left out"] = float(abs(reference / base_loss - 1))
    result = run_step(model, plan, documents, world, loss_chunk_rows=7)
    assert result.grad_norm is not None
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    local = gradients_of(model)
    assert home.layout.pp > 1 or local.keys() == gradients.keys()
    errors |= {"loss": abs(result.loss / loss - 1), "norm": abs(result.grad_norm / norm - 1)}
    errors |= {key: error(x, gradients[key]) for key, x in local.items()}
    if base:
        model.zero_grad()
        optimizer = build_optimizer(model, "adamw", lr=1e-3)
        run_step(model, plan, documents, world, optimizer=optimizer)
        assert len(optimizer.state) == len(local)
        with peft_model.disable_adapter():  # the adapter has changed, the base model has not
            later = run_step(model, plan, documents, world, backward=False).loss
        errors["base"] = abs(later / base_loss - 1)
    return errors


Table = Mapping[str, tuple[Home, tuple[tuple[str, str], ...]]]  # the (family, adapter) that run under a home
PP, TP, TP_OF_4 = Layout(ranks=2, pp=2), Layout(ranks=2, tp=2), Layout(ranks=4, tp=2)
SEQUENCE_PARALLEL, FULL = {"sequence_parallel": True}, {"activation_checkpointing": "full"}
SPLIT = {"virtual_stages": 2, "pipeline_schedule": "zero_bubble"}
TIED = ("qwen3", "embedding and head")


def _llama(*adapters: str) -> tuple[tuple[str, str], ...]:
    return tuple(("llama", adapter) for adapter in adapters)


FEW: Table = {
    "cp 2": (Home(Layout(ranks=2)), _llama("dora")),
    "tp 2": (Home(TP), (TIED,)),
    "pp 2, zero bubble": (
        Home(PP, {"pipeline_schedule": "zero_bubble", "activation_checkpointing": "selective"}),
        _llama("the first layer"),
    ),
    "ep 2": (Home(Layout(ranks=2, ep=2)), (("qwen3-moe", "experts"),)),
}
OF_TWO: Table = {
    "tp 2, sequence parallel": (Home(TP, {**SEQUENCE_PARALLEL, **FULL}), (("biased", "every linear"),)),
    "pp 2": (Home(PP), _llama("embedding and head")),
    "modules_to_save": (Home(Layout(ranks=2)), _llama("modules_to_save")),
    "ep 2": (Home(Layout(ranks=2, ep=2)), (("qwen3-moe", "attention"),)),
    "dynamic, copies": (Home(Layout(ranks=2), {"shard_parameters": False}, dynamic=True), _llama("every linear")),
    "pp 2, interleaved": (Home(PP, {"virtual_stages": 2}), (("deep", "the last layer"),)),
    "pp 2, interleaved zero bubble": (Home(PP, SPLIT), (("deep", "every linear"),)),
    "tp 2, experts": (Home(TP), (("qwen3-moe", "attention"), ("qwen3-moe", "experts"), ("gpt-oss", "experts"))),
    "experts": (Home(Layout(ranks=2)), (("gpt-oss", "experts"), ("qwen3-moe", "last products of experts"))),
    "experts, pp 2": (Home(PP, FULL), (("gpt-oss", "experts"), ("qwen3-moe", "experts"))),
    "experts, rows split": (Home(TP, SEQUENCE_PARALLEL | FULL), (("gpt-oss", "experts"),)),
    "experts, dynamic, ep 2": (Home(Layout(ranks=2, ep=2), FULL, dynamic=True), (("gpt-oss", "experts"),)),
    "experts, copies": (Home(Layout(ranks=2), {"shard_parameters": False}), (("qwen3-moe", "experts"),)),
}
OF_FOUR: Table = {
    "tp 2 of 4": (Home(TP_OF_4, SEQUENCE_PARALLEL), (("biased", "every linear"), TIED)),
    "free": (Home(Layout(ranks=4), dynamic=True, mode="free"), _llama("every linear", "the last layer")),
    "pp 2, tp 2": (Home(Layout(ranks=4, pp=2, tp=2)), _llama("every linear")),
    "ep 2, tp 2": (Home(Layout(ranks=4, tp=2, ep=2)), (("qwen3-moe", "experts"), ("gpt-oss", "experts"))),
    "ep 2 of 4": (Home(Layout(ranks=4, ep=2)), (("qwen3-moe", "experts"),)),
    "replicas": (Home(Layout(ranks=4, dp_replicate=2)), _llama("every linear")),
}
CASES = (
    ("qwen3-next", "mixers"),
    ("qwen3.5", "every linear"),
    ("bamba", "mixers"),
    ("bamba", "every linear"),
    ("qwen3-next", "projections"),
)
OTHERS = tuple((family, "projections") for family in here(OTHER_HYBRIDS))
CP_MIXERS, DYNAMIC = Home(Layout(ranks=2), partition="contiguous"), Home(Layout(ranks=2), FULL, dynamic=True)
TP_MIXERS, PP_MIXERS = Home(TP, partition="contiguous"), Home(PP, partition="contiguous")
INDEXED = [(family, "projections") for family in indexed_here([f"deepseek-v3.2{MANY_HEADS}"])]
FEW_MIXERS: Table = {"dynamic": (DYNAMIC, CASES[3:4]), "tp 2": (TP_MIXERS, CASES[1:2])}
MIXERS: Table = {
    "cp 2": (CP_MIXERS, (*CASES, *OTHERS)),
    "dynamic": (DYNAMIC, (*CASES, *INDEXED)),
    "tp 2": (TP_MIXERS, (*CASES, *OTHERS)),
    "pp 2": (PP_MIXERS, (*CASES, ("zamba2", "projections"))),
    "pp 2, zero bubble": (
        Home(PP, {"pipeline_schedule": "zero_bubble"}, partition="contiguous"),
        (("zamba2", "projections"),),
    ),
}
OF_FOUR_MIXERS = {"tp 2, cp 2": (Home(TP_OF_4, SEQUENCE_PARALLEL | FULL, partition="contiguous"), (*CASES, *OTHERS))}


def _answers(rank: int, table: Table, of_mixers: bool) -> dict[tuple[str, str], Exact]:
    with compute_in_float64() if of_mixers else nullcontext():
        return {case: dense_answer(*case) for _, cases in table.values() for case in cases}


def _compare(
    rank: int, table: Table, of_mixers: bool, exact: dict[tuple[str, str], Exact]
) -> dict[str, dict[str, float]]:
    errors = dict[str, dict[str, float]]()
    for name, (home, cases) in table.items():
        with World(home.layout, backend=backend(), timeout=60) as world:
            for number, (family, adapter) in enumerate(cases):
                base = not (of_mixers or number or home.options or home.layout.pp > 1 or home.layout.ep > 1)
                how: dict[str, Any] = {
                    "trial": not errors and table is not FEW_MIXERS,
                    "base": base,
                    "exact": exact[family, adapter],
                }
                with compute_in_float64() if of_mixers else nullcontext():
                    errors[f"{name}, {family}, {adapter}"] = errors_of(home, family, adapter, world, **how)
    return errors


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")  # peft's own
@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    ("ranks", "table", "of_mixers"),
    [
        pytest.param(2, FEW, False, id="few"),
        pytest.param(2, FEW_MIXERS, True, id="few mixers"),
        pytest.param(2, OF_TWO, False, marks=pytest.mark.whole, id="2"),
        pytest.param(4, OF_FOUR, False, marks=pytest.mark.whole, id="4"),
        pytest.param(2, MIXERS, True, marks=pytest.mark.whole, id="mixers 2"),
        pytest.param(4, OF_FOUR_MIXERS, True, marks=pytest.mark.whole, id="mixers 4"),
    ],
)
def test_adapters_are_those_of_one_process(ranks: int, table: Table, of_mixers: bool) -> None:
    # A model made before it in a process changes what transformers' Bamba answers.
    exact = run_ranks(_answers, 1, table, True)[0] if of_mixers else _answers(0, table, False)
    for errors in run_ranks(_compare, ranks, table, of_mixers, exact, timeout=300):
        assert len(errors) == sum(len(cases) for _, cases in table.values())
        bound = 1e-11 if of_mixers else 1e-12
        assert all(value <= bound for of_case in errors.values() for value in of_case.values()), errors


# ---- terms that ranks could forget without an error


def _unscaled(family: str, adapter: str) -> Any:
    peft_model = adapted(family, adapter)
    for layer in peft_modules(peft_model.get_base_model()).values():
        layer.scaling = {"default": 1.0}  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return peft_model


SPLIT, SUMMED, SCALING = (
    "model.tensor_parallel.split_modules",
    "sum_partial_gradients(linear, key)",
    "scaling forgotten",
)
FIRST, SECOND = "else first:\n        ", "for linear in second:\n            "
MUTATIONS: dict[str, tuple[Change | None, set[str]]] = {  # and what shows it
    "nothing": (None, set()),
    "no sum of A's gradient, column-wise": ((SPLIT, f"{FIRST}{SUMMED}", f"{FIRST}pass"), {"lora_A"}),
    "no sum of B's gradient, row-wise": ((SPLIT, f"{SECOND}{SUMMED}", f"{SECOND}pass"), {"lora_B"}),
    "bias on every rank": ((SPLIT, '"bias": return_none', '"bias": local_tensor'), {"loss"}),
    SCALING: (None, {"loss", "lora_A", "lora_B"}),  # peft's own term
    "adapter not left out": (("model.adapters.disable_adapter", "module._disable_adapters = True", "pass"), {"base"}),
}


def _noticed(rank: int) -> dict[str, set[str]]:
    """By what is wrong, what of a step under tp 2 is not that of one process."""
    noticed = dict[str, set[str]]()
    with World(TP, backend=backend(), timeout=60) as world:
        for name, (change, _) in MUTATIONS.items():
            with mutated(change):
                make = _unscaled if name == SCALING else adapted
                exact = dense_answer("biased", "every linear")
                errors = errors_of(Home(TP), "biased", "every linear", world, exact, make=make)
            noticed[name] = {key.split(".")[-3] if "." in key else key for key, e in errors.items() if e > 1e-9}
    return noticed


@pytest.mark.whole
def test_every_term_that_is_left_out_is_noticed() -> None:
    for noticed in run_ranks(_noticed, 2, timeout=200):
        assert not noticed["nothing"]
        assert all(shown <= noticed[name] for name, (_, shown) in MUTATIONS.items()), noticed

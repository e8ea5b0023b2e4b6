"""Every family of mixtures of experts equals its stock model, losses of routers included, under every kind of home.

A few families stand for each kind of router and of block in CI; the others are `whole`.
"""

import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from longspan.comm import World
from longspan.doctor.stock import compute_in_float64
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.experts.router import RouterCoefficients
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from tests import parity
from tests.model.experts.moe_models import FAMILIES, MoeStock, family_model, router_losses
from tests.model.stock import gradients_of, texts
from tests.mutation import mutated
from tests.versions import transformers_before

LENGTHS = (13, 1, 30, 7, 2, 18)
WEIGHTS = RouterCoefficients(balance=0.5, z=0.1)
NONE = RouterCoefficients(balance=0.0)
TOLERANCE = 1e-12

# A bias beside sigmoids, with a loss; groups and shared experts; a softmax with a bias beside, with a loss.
CI = tuple(family for family in ("minimax_m2", "glm4_moe") if family in FAMILIES)
HOMES = {"cp 2": Layout(ranks=2), "ep 2": Layout(ranks=2, ep=2), "pp 2": Layout(ranks=2, pp=2)}
PARTS = "tp 2, rows in parts"
HOMES |= {"tp 2": Layout(ranks=2, tp=2), PARTS: Layout(ranks=2, tp=2), "cp 3": Layout(ranks=3)}
Case = tuple[str, str]  # home, family

# What is refused, and why; every other home of every family is exact.
_STYLE = "tensor-parallel style 'mla_kv_a_proj' of model.layers.0.self_attn.kv_a_proj_with_mqa is not supported"
_NO_PLACE = r"model.layers.0.(self_attn|mlp|router) \(\w+\) has no place in a sequence-parallel region"
REFUSED: dict[Case, str] = {(home, f): _STYLE for home in ("tp 2", PARTS) for f in ("glm4_moe_lite", "deepseek_v2")}
REFUSED["ep 2", "llama4_text"] = "the home has ep 2, but Llama4ForCausalLM has no experts to deal out"
REFUSED["pp 2", "gemma4_text"] = "has parameters that its pipeline plan does not place"
REFUSED |= {(PARTS, family): _NO_PLACE for family in ("afmoe", "gemma4_text")}
# What families lack in a transformers before the one that this table is of: plans, and Aria's experts as one module.
OLDER = transformers_before("5.23")
LACKING = "has no tensor-parallel plan|has no experts to deal out|AriaTextForCausalLM cannot be probed"


@cache
def has_losses(family: str) -> bool:
    """Whether transformers gives the logits of the family's routers (some have the coefficient of a loss alone)."""
    model = family_model(family).eval()
    if family == "llama4_text" or not hasattr(model.config, "router_aux_loss_coef"):
        return False
    with torch.no_grad():
        ids = torch.zeros((1, 3), dtype=torch.long)
        return model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits is not None


def stock_step(family: str) -> MoeStock:
    """The stock model sees documents one by one; losses of routers are over all tokens."""
    model, losses = family_model(family, torch.float64).eval(), has_losses(family)
    targets, loss = sum(LENGTHS) - len(LENGTHS), torch.zeros((), dtype=torch.float64)
    logits: list[Sequence[Tensor]] = []
    for document in texts(LENGTHS):
        ids = torch.from_numpy(document)
        asked: dict[str, Any] = {"output_router_logits": True} if losses else {}
        out = model(input_ids=ids[None], use_cache=False, **asked)
        logits.append(out.router_logits if losses else ())
        loss = loss + F.cross_entropy(out.logits[0, :-1], ids[1:], reduction="sum") / targets
    balance = z = torch.zeros(())
    if losses:
        layers = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
        balance, z = router_losses(layers, model.config.num_experts_per_tok)
    (loss + 0.5 * balance + 0.1 * z).backward()
    return MoeStock(loss.item(), balance.item(), z.item(), gradients_of(model))


def outcomes(rank: int, homes: dict[str, Sequence[str]], stock: dict[str, MoeStock]) -> dict[Case, float | str]:
    answers: dict[Case, float | str] = {}
    with compute_in_float64():
        for name, families in homes.items():
            with World(HOMES[name], backend=backend()) as world:
                for family in families:
                    try:
                        answers[name, family] = _error(family, world, stock[family], in_parts=name == PARTS)
                    except ModelError as error:
                        answers[name, family] = str(error)
    return answers


def _error(family: str, world: World, stock: MoeStock, *, in_parts: bool) -> float:
    """Of CI's families one is tried, in one home, and one kind of messages is sent; of the others both are."""
    home, known = world.home, has_losses(family)
    kinds = ("p2p", "all_gather") if home.slots > 1 and family not in CI else ("p2p",)
    options: dict[str, Any] = {"cp": home.slots, "row_multiple": home.tp if in_parts else 1}
    case = parity.Case(
        partial(family_model, family, torch.float64),
        home,
        {kind: plan_fixed(LENGTHS, home, cp_comm_type=kind, **options) for kind in kinds},
        texts(LENGTHS),
        stock,
        options={"activation_checkpointing": True, "sequence_parallel": in_parts},
        step={"router": WEIGHTS if known else NONE},
        more=stock.more if known else {},
        tried=family not in CI or (home == HOMES["cp 2"] and family == CI[0]),
    )
    model = case.prepared(world)
    return max(max(parity.step_errors(case, model, plan, world)[0]) for plan in case.plans.values())


@cache
def _answers(ranks: int, in_ci: bool) -> list[dict[Case, float | str]]:
    homes = {name: [f for f, few in rows.items() if few is in_ci] for name, rows in ROWS.items()}
    homes = {name: families for name, families in homes.items() if len(HOMES[name].ranks) == ranks}
    with compute_in_float64():
        stock = {family: stock_step(family) for families in homes.values() for family in families}
    return run_ranks(outcomes, ranks, homes, stock, timeout=900)


IN_CI = {"cp 2": CI, "ep 2": CI[:1], "pp 2": CI[1:], "tp 2": CI[:1], PARTS: CI[1:], "cp 3": ()}  # each pair of degrees
ROWS = {
    home: {f: f in few for f in FAMILIES if f in few or f not in CI or home == "cp 3"} for home, few in IN_CI.items()
}


@pytest.mark.parametrize(
    ("home", "family", "in_ci"),
    [
        pytest.param(home, family, few, id=f"{home}-{family}", marks=[] if few else [pytest.mark.whole])
        for home, families in ROWS.items()
        for family, few in families.items()
    ],
)
def test_equals_the_stock_model(home: str, family: str, in_ci: bool) -> None:
    for of_rank in _answers(len(HOMES[home].ranks), in_ci):
        answer, says = of_rank[home, family], REFUSED.get((home, family))
        if OLDER and isinstance(answer, str) and re.search(LACKING, answer):
            pytest.skip(f"transformers {transformers.__version__}: {answer}")
        if says is None:
            assert isinstance(answer, float) and answer < TOLERANCE, answer
        else:
            assert isinstance(answer, str) and re.search(says, answer), answer


MUTATIONS: dict[str, tuple[str, str, str, str, str]] = {  # home, family, module, before and after
    "an expert fewer in a row's load": (
        "cp 2", "minimax_m2", "model.experts.router", "topk(chosen.shape[1], dim", "topk(chosen.shape[1] - 1, dim",
    ),
    "shared experts in parts of the rows": (
        PARTS, "glm4_moe", "model.tensor_parallel.split_model", "copy_input if whole", "copy_input if False",
    ),
    "an attention's whole inputs": (
        "tp 2", "minimax_m2", "model.tensor_parallel.split_modules",
        "partial(tp_split, world_key=key, dim=-1) if whole",
        "(lambda x: x.chunk(world.home.tp, -1)[0]) if whole",
    ),
}  # fmt: skip


def _mutated(rank: int, stock: dict[str, MoeStock]) -> dict[str, float | str]:
    answers: dict[str, float | str] = {}
    for name, (home, family, module, old, new) in MUTATIONS.items():
        try:
            with mutated((module, old, new)):
                answers[name] = outcomes(rank, {home: [family]}, stock)[home, family]
        except RuntimeError as error:  # sizes that do not fit
            answers[name] = str(error)
    return answers


@pytest.mark.whole
def test_a_term_that_is_dropped_is_noticed() -> None:
    with compute_in_float64():
        stock = {family: stock_step(family) for family in CI}
    for name, answer in run_ranks(_mutated, 2, stock, timeout=300)[0].items():
        assert isinstance(answer, str) or answer > 1e-6, (name, answer)

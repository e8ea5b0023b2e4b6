"""Models whose heads, widths, vocabulary and experts' rows are split over tp equal the stock model, in every layout."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from transformers import PreTrainedModel

from longspan.comm import World, bind
from longspan.errors import LongspanError, ModelError, PlanError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.experts.router import RouterCoefficients
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.experts.moe_models import moe_answer, moe_model
from tests.model.stock import error, gradients_of, prepare_untried, stock_answer, texts, tiny, weights_of, worst

LENGTHS = (13, 1, 30, 7, 2, 18)
ROUTER = RouterCoefficients(balance=0.5, z=0.1)
EVEN = 62  # a vocabulary that tp 2 divides: the head is split; that of the mixture models is odd
RECOMPUTED, COPIES = "recomputed, sequence parallel", "copies, sequence parallel"
CASES = {
    torch.float64: {
        "qwen3": ("sharded", COPIES),
        "llama": (RECOMPUTED,),
        "qwen3-moe": ("copies", RECOMPUTED),
        "gpt-oss": ("sharded", COPIES),
        "apertus": ("sharded", COPIES),
    },
    torch.float32: {
        "llama": ("sharded",),
        "mistral": ("sharded",),
        "gemma2": (RECOMPUTED,),
        "qwen3-moe": ("sharded",),
        "gpt-oss": (RECOMPUTED,),
    },
}
MODELS = [(f, dtype, k) for dtype, families in CASES.items() for f, kinds in families.items() for k in kinds]
FEW = [  # the others run with make test-all
    m for m in MODELS if m[1] == torch.float64 and m[2] != COPIES and m != ("qwen3-moe", torch.float64, RECOMPUTED)
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
Case = tuple[str, torch.dtype, str]
Found = dict[tuple[object, ...], tuple[float, float, float]]


def _idle(home: Layout, rows: int) -> Plan:
    """Slot 0 has an odd number of rows and slot 1 none, then the other way round; the last is a dummy for all."""
    others = tuple(range(1, home.slots)) or (0,)
    first = MicroBatch((Group((0,), (0, 1, 4), (13, 1, 2)),))
    second = MicroBatch((Group(others, (2, 3), (30, 7)), Group(others[:1], (5,), (18,))))
    targets = sum(LENGTHS) - len(LENGTHS)
    return Plan(home.slots, LENGTHS, (first, second, MicroBatch()), targets=targets, row_multiple=rows)


PLANS: dict[str, Callable[[Layout, int], Plan]] = {
    "fixed": lambda home, rows: plan_fixed(LENGTHS, home, cp=home.slots, row_multiple=rows),
    "padded": lambda home, rows: plan_padded(LENGTHS, home, cp=1, max_tokens_per_slot=64, row_multiple=rows),
    "dynamic": lambda home, rows: plan_dynamic(
        LENGTHS, home, max_tokens_per_slot=22 if home.slots > 1 else 32, row_multiple=rows
    ),
    "idle slots": _idle,
    "free": lambda home, rows: plan_dynamic(LENGTHS, home, max_tokens_per_slot=22, row_multiple=rows, mode="free"),
}


def _model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    if family in ("qwen3-moe", "gpt-oss"):
        return moe_model(family, dtype)
    return tiny(family, dtype, attention="eager" if family == "gemma2" else "sdpa", vocabulary=EVEN)


def _prepared(family: str, dtype: torch.dtype, kind: str, world: World, *, try_rows: bool = True) -> nn.Module:
    return (prepare if try_rows else prepare_untried)(
        _model(family, dtype),
        world,
        shard_parameters="copies" not in kind,
        activation_checkpointing="recomputed" in kind,
        sequence_parallel="sequence parallel" in kind,
    )


@cache
def _wanted(family: str, dtype: torch.dtype, device: torch.device) -> tuple[float, dict[str, torch.Tensor]]:
    documents = texts(LENGTHS)
    if family in ("qwen3-moe", "gpt-oss"):
        moe = moe_answer(_model(family, dtype), documents, ROUTER, device)
        return moe.loss, moe.gradients
    stock = stock_answer(family, dtype, documents, device, vocabulary=EVEN)
    return stock.loss, stock.gradients


def _plans_of(home: Layout, case: Case) -> tuple[str, ...]:
    """Every plan for the first model at tp 2; what depends on the plan does not depend on the dtype."""
    family, dtype, kind = case
    if family == "qwen3" and home.tp > 1:
        return tuple(PLANS) if kind == "sharded" else ("fixed", "idle slots", "free")
    return ("dynamic", "idle slots") if dtype == torch.float64 else ("idle slots",)


def _compare(home: Layout, cases: list[Case]) -> Found:
    """Errors of the loss, of the gradients' norm, and the worst of all gradients, by case and plan."""
    results: Found = {}
    tried = set[str]()
    with World(home, backend=backend()) as world:
        for family, dtype, kind in cases:
            loss, gradients = _wanted(family, dtype, world.device)
            norm = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
            model = _prepared(family, dtype, kind, world, try_rows=not tried)
            tried.add(family)
            router = ROUTER if family in ("qwen3-moe", "gpt-oss") else None
            for name in _plans_of(home, (family, dtype, kind)):
                plan = PLANS[name](home, home.tp if "sequence" in kind else 1)
                result = run_step(model, plan, texts(LENGTHS), world, router=router, loss_chunk_rows=7)
                assert result.grad_norm is not None
                of_stages = gradients_of(model)
                expected = (
                    gradients if home.pp == 1 else {key: gradients[key] for key in of_stages}
                )  # of the stages here
                far = abs(result.loss / loss - 1), abs(result.grad_norm / norm - 1), worst(of_stages, expected)
                results[family, dtype, kind, name] = far
                model.zero_grad()
    return results


HOMES: dict[Layout, list[Case]] = {
    Layout(ranks=4, tp=2): MODELS,
    Layout(ranks=4, dp_replicate=2): [("qwen3", torch.float64, "sharded")],
    Layout(ranks=4, tp=2, dp_replicate=2): [("llama", torch.float64, RECOMPUTED)],
    Layout(ranks=4, pp=2, tp=2): [("llama", torch.float64, RECOMPUTED)],
    Layout(ranks=8, tp=2, ep=2, dp_replicate=2): [("qwen3-moe", torch.float64, "sharded, sequence parallel")],
}


def _in_ci(home: Layout, case: Case) -> bool:
    """Stages and gpt-oss beside tp are in the matrix of training too, replicas without tp in test_step.py."""
    return case in FEW and home.pp == 1 and home.tp == 2 and case[0] != "gpt-oss"


def _compare_homes(rank: int, homes: dict[Layout, list[Case]]) -> dict[Layout, Found]:
    """One crew of ranks goes through all its homes."""
    return {home: _compare(home, cases) for home, cases in homes.items()}


@cache
def _results(ranks: int, few: bool) -> list[dict[Layout, Found]]:
    homes = {home: [case for case in cases if _in_ci(home, case) == few] for home, cases in HOMES.items()}
    return run_ranks(_compare_homes, ranks, {h: c for h, c in homes.items() if len(h.ranks) == ranks}, timeout=240)


def _check(answers: list[Found], home: Layout, case: Case) -> None:
    for answer in answers:
        of_case = {key: errors for key, errors in answer.items() if key[:3] == case}
        assert len(of_case) == len(_plans_of(home, case))
        for key, (loss, norm, gradients) in of_case.items():
            assert gradients < TOLERANCE[case[1]] and norm < TOLERANCE[case[1]], (key, of_case[key])
            assert loss < (1e-12 if case[1] == torch.float64 else 1e-6), (key, of_case[key])


ROWS = [
    pytest.param(home, case, id=f"{home}-{case}", marks=[pytest.mark.whole] * (not _in_ci(home, case)))
    for home, cases in HOMES.items()
    for case in cases
]


@pytest.mark.parametrize(("home", "case"), ROWS)
def test_equals_the_stock_model(home: Layout, case: Case) -> None:
    """Heads and widths over tp, with replicas, stages and dealt experts too."""
    _check([answers[home] for answers in _results(len(home.ranks), _in_ci(home, case))], home, case)


STEPS, RATE, NORM = 3, 0.5, 1.0


def _train(rank: int, dtype: torch.dtype) -> tuple[float, float, list[str]]:
    """Parameters after three clipped steps of SGD and the last loss, against the stock model; what is split how."""
    documents, targets = texts(LENGTHS), sum(LENGTHS) - len(LENGTHS)
    with World(Layout(ranks=4, tp=2), backend=backend()) as world:
        stock = nn.Module.to(_model("qwen3", dtype), world.device)
        plain = torch.optim.SGD(stock.parameters(), lr=RATE)
        exact = 0.0
        for _ in range(STEPS):
            plain.zero_grad()
            rows = [torch.from_numpy(document).to(world.device) for document in documents]
            out = [stock(input_ids=ids[None], use_cache=False).logits[0, :-1] for ids in rows]
            loss = F.cross_entropy(torch.cat(out), torch.cat([ids[1:] for ids in rows]), reduction="sum") / targets
            loss.backward()
            nn.utils.clip_grad_norm_(stock.parameters(), NORM)
            plain.step()
            exact = loss.item()
        model = _prepared("qwen3", dtype, RECOMPUTED, world)
        optimizer = build_optimizer(model, "sgd", lr=RATE)
        plans = [PLANS[name](world.home, 2) for name in ("fixed", "dynamic", "idle slots")]
        losses = [run_step(model, plan, documents, world, optimizer, max_grad_norm=NORM).loss for plan in plans]
        evaluated = run_step(model, PLANS["padded"](world.home, 2), documents, world, backward=False).loss
        assert evaluated < losses[-1] < losses[0]
        split = [name for name, p in model.named_parameters() if isinstance(p, DTensor) and p.device_mesh.ndim == 2]
        return worst(weights_of(model), weights_of(stock)), abs(losses[-1] / exact - 1), split


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.whole)], ids=str)
def test_parameters_after_three_steps(dtype: torch.dtype) -> None:
    for weights, loss, split in run_ranks(_train, 4, dtype):
        assert weights < TOLERANCE[dtype] and loss < TOLERANCE[dtype]
        layers = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
        names = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in layers} | {"model.embed_tokens.weight"}
        assert set(split) == names


def _look(rank: int) -> tuple[float, list[tuple[object, ...]]]:
    """Logits of a tied, split head, whole on every rank; and how parameters without FSDP2 lie on the tp mesh."""
    with World(Layout(ranks=2, tp=2), backend=backend()) as world:
        model = _prepared("qwen3", torch.float64, COPIES, world)
        shard = bind(plan_fixed(LENGTHS[:1], world.home, cp=1).micro_batches[0], world).with_padding(multiple=2)
        ids = torch.from_numpy(texts(LENGTHS[:1])[0]).to(world.device)
        inputs = {"position_ids": shard.position_ids, "shard": shard}
        logits = model(input_ids=shard.scatter(ids), **inputs).logits[0, : len(ids)]
        stock = nn.Module.to(_model("qwen3", torch.float64), world.device)
        lie = [(p.placements, p.to_local().shape) for p in model.parameters() if isinstance(p, DTensor)]
        return error(logits, stock(input_ids=ids[None]).logits[0]), lie


def test_logits_are_whole_and_slices_are_even() -> None:
    for logits, lie in run_ranks(_look, 2):
        assert logits < 1e-12
        assert ((Shard(0),), (EVEN // 2, 32)) in lie and ((Shard(1),), (32, 24)) in lie and len(lie) == 15


def _no_plan(model: PreTrainedModel) -> None:
    model.config.base_model_tp_plan = None


def _odd_style(model: PreTrainedModel) -> None:
    model.config.base_model_tp_plan = {"layers.*.mlp.gate_proj": "mla_kv_a_proj"}


def _odd_width(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        for name, shape in {"gate_proj": (49, 32), "up_proj": (49, 32), "down_proj": (32, 49)}.items():
            setattr(layer.mlp, name, nn.Linear(shape[1], shape[0], bias=False))


def _odd_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].adapter = nn.Sequential(nn.Linear(32, 32))


def _beside_norm(model: PreTrainedModel) -> None:
    model.model.embed_norm = nn.LayerNorm(32)


def _as_it_is(model: PreTrainedModel) -> None:
    pass


REFUSED: list[tuple[Layout, str, Callable[[PreTrainedModel], None], bool, str]] = [
    (Layout(ranks=4, tp=4), "llama", _as_it_is, False, r"tp 4 does not divide 2 \(key/value heads\) .* use tp 1 or 2"),
    (Layout(ranks=4, tp=2), "llama", _odd_width, False, r"49 \(width of model.layers.\*.mlp.gate_proj\).* use tp 1"),
    (Layout(ranks=4, tp=2), "llama", _no_plan, False, "LlamaForCausalLM has no tensor-parallel plan"),
    (Layout(ranks=4, tp=2), "llama", _odd_style, False, "style 'mla_kv_a_proj' of model.layers.0.mlp.gate_proj is not"),
    (
        Layout(ranks=4, tp=2),
        "llama",
        _odd_layer,
        True,
        r"model.layers.1.adapter \(Sequential\) has no place in a sequence",
    ),
    (Layout(ranks=4, tp=2), "llama", _beside_norm, True, r"outside its .* \(embed_norm.weight, embed_norm.bias\)"),
    (Layout(ranks=4, tp=2), "nanochat", _as_it_is, True, "calls norm 2 times .*, as norm, layers.0, layers.1, norm;"),
    (Layout(ranks=4), "llama", _as_it_is, True, "sequence_parallel splits rows over .* the home has tp 1"),
]


def _refusals(rank: int) -> list[str]:
    refusals: list[str] = []
    for home, family, change, rows, _ in REFUSED:
        with World(home, backend=backend()) as world:
            model = _model(family, torch.float32)
            change(model)
            before = len(world.process_groups.made)
            with pytest.raises(ModelError) as caught:
                prepare(model, world, sequence_parallel=rows)
            assert len(world.process_groups.made) == before and not any(
                isinstance(p, DTensor) for p in model.parameters()
            )
            refusals.append(str(caught.value))
    with World(Layout(ranks=4, tp=2), backend=backend()) as world:
        model = _prepared("llama", torch.float32, RECOMPUTED, world)
        plan = plan_fixed((9, 5), world.home, cp=2)
        shard = bind(plan.micro_batches[0], world)
        ids = torch.zeros(1, shard.local_rows, dtype=torch.long, device=world.device)
        for call in (
            lambda: run_step(model, plan, texts((9, 5)), world),
            lambda: model(input_ids=ids, position_ids=shard.position_ids[None], shard=shard),
        ):
            with pytest.raises(LongspanError) as caught:
                call()
            refusals.append(f"{type(caught.value).__name__}: {caught.value}")
    return refusals


def test_what_tp_does_not_fit_is_refused_before_anything_is_split() -> None:
    plan = rf"{PlanError.__name__}: the plan has row_multiple 1, the model .* tp 2; plan with row_multiple=2"
    shard = r"ModelError: the shard holds \d rows, .* tp 2; use shard.with_padding\(multiple=2\)"
    for refusals in run_ranks(_refusals, 4):
        for refusal, says in zip(refusals, [*(case[-1] for case in REFUSED), plan, shard], strict=True):
            with pytest.raises(AssertionError, match=says):
                raise AssertionError(refusal)

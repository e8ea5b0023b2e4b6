"""Models whose heads, widths, vocabulary and rows of experts are split over tp equal the stock model or are refused."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from transformers import PreTrainedModel

from longspan import Layout, World, bind, prepare, run_step
from longspan.errors import ModelError, PlanError
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.experts.router import RouterCoefficients
from longspan.model.feature import Call
from longspan.model.options import PrepareOptions
from longspan.model.tensor_parallel.module_styles import (
    COLWISE,
    PACKED,
    ROWWISE,
    list_styles,
    refuse_unnamed_parameters,
)
from longspan.model.tensor_parallel.split_model import TensorParallelFeature
from longspan.model.tensor_parallel.split_trial import mixes_features, refuse_mixed_features
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from tests import parity
from tests.model.experts.moe_models import moe_answer, moe_model
from tests.model.stock import error, prepare_untried, stock_answer, texts, tiny

LENGTHS = (13, 1, 30, 7, 2, 18)
EXPERTS = ("qwen3-moe", "gpt-oss")
ROUTER = RouterCoefficients(balance=0.5, z=0.1)
EVEN = 62  # a vocabulary that tp 2 divides: the head is split; that of the mixture models is odd
RECOMPUTED, COPIES = "recomputed, sequence parallel", "copies, sequence parallel"
Case = tuple[str, torch.dtype, str]


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
    if family in EXPERTS:
        return moe_model(family, dtype)
    return tiny(family, dtype, attention="eager" if family == "gemma2" else "sdpa", vocabulary=EVEN)


def _options(kind: str) -> dict[str, bool]:
    return {
        "shard_parameters": "copies" not in kind,
        "activation_checkpointing": "recomputed" in kind,
        "sequence_parallel": "sequence parallel" in kind,
    }


def _case(home: Layout, case: Case, plans: tuple[str, ...]) -> parity.Case:
    family, dtype, kind = case
    documents, rows = texts(LENGTHS), home.tp if "sequence" in kind else 1
    step: dict[str, Any] = {"loss_chunk_rows": 7}
    exact: Any
    more = dict[str, float]()
    if family in EXPERTS:
        exact = moe_answer(_model(family, dtype), documents, ROUTER)
        step["router"] = ROUTER
        more = exact.more
    else:
        exact = stock_answer(family, dtype, documents, vocabulary=EVEN)
    return parity.Case(
        partial(_model, family, dtype),
        home,
        {name: PLANS[name](home, rows) for name in plans},
        documents,
        exact,
        parity.WIDE if dtype == WIDE else parity.SINGLE,
        _options(kind),
        step,
        more,
        tried=len(home.ranks) == 2 and family in EXPERTS,
    )


WIDE, SINGLE = torch.float64, torch.float32
TWO = ("dynamic", "idle slots")
Cases = dict[Case, tuple[str, ...]]  # and their plans
IN_CI: dict[Layout, Cases] = {  # the others run with make test-all
    Layout(ranks=4, tp=2): {("qwen3", WIDE, "sharded"): ("free",)},
    Layout(ranks=2, tp=2): {("qwen3-moe", WIDE, "copies"): ("dynamic",), ("apertus", WIDE, "sharded"): ("fixed",)},
}
OTHERS: dict[Layout, Cases] = {
    Layout(ranks=4, tp=2): {
        ("qwen3", WIDE, COPIES): ("fixed", "idle slots", "free"),
        ("llama", WIDE, RECOMPUTED): ("idle slots",),
        ("qwen3-moe", WIDE, RECOMPUTED): TWO,
        ("gpt-oss", WIDE, COPIES): TWO,
        ("apertus", WIDE, COPIES): TWO,
        ("mistral", SINGLE, "sharded"): TWO[1:],
        ("gemma2", SINGLE, RECOMPUTED): TWO[1:],
    },
    Layout(ranks=4, dp_replicate=2): {("qwen3", WIDE, "sharded"): TWO},
    Layout(ranks=4, tp=2, dp_replicate=2): {("llama", WIDE, RECOMPUTED): TWO},
    Layout(ranks=4, pp=2, tp=2): {("llama", WIDE, RECOMPUTED): TWO},
    Layout(ranks=8, tp=2, ep=2, dp_replicate=2): {("qwen3-moe", WIDE, "sharded, sequence parallel"): TWO},
}


@pytest.mark.parametrize("homes", parity.by_ranks({"few": IN_CI, "others": OTHERS}))
def test_equals_the_stock_model(homes: dict[Layout, Cases]) -> None:
    """Heads and widths over tp, with replicas, stages and dealt experts too."""
    rows = [(home, case, plans) for home, cases in homes.items() for case, plans in cases.items()]
    parity.check({(home, case): _case(home, case, plans) for home, case, plans in rows})


def _look(rank: int) -> tuple[float, list[tuple[object, ...]], set[str]]:
    """Logits of a tied, split head, whole on every rank; how parameters without FSDP2 lie on the tp mesh, and which.

    What is refused is refused before anything is split, also calls whose rows tp does not divide.
    """
    with World(Layout(ranks=2, tp=2), backend=backend()) as world:
        odd, before = _model("llama", SINGLE), len(world.process_groups.made)
        _odd_width(odd)
        with pytest.raises(ModelError, match=r"49 \(width of model.layers.\*.mlp.gate_proj\).* use tp 1"):
            prepare(odd, world)
        assert len(world.process_groups.made) == before and not any(isinstance(p, DTensor) for p in odd.parameters())
        model = prepare_untried(_model("qwen3", WIDE), world, **_options(COPIES))
        plan = plan_fixed(LENGTHS[:1], world.home, cp=1)
        shard = bind(plan.micro_batches[0], world)
        ids = torch.from_numpy(texts(LENGTHS[:1])[0]).to(world.device)
        with pytest.raises(
            PlanError, match=r"the plan has row_multiple 1, the model .* tp 2; plan with row_multiple=2"
        ):
            run_step(model, plan, texts(LENGTHS[:1]), world)
        with pytest.raises(ModelError, match=r"holds 13 rows, .* tp 2; use shard.with_padding\(multiple=2\)"):
            model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard)
        shard = shard.with_padding(multiple=2)
        inputs = {"position_ids": shard.position_ids, "shard": shard}
        logits = model(input_ids=shard.scatter(ids), **inputs).logits[0, : len(ids)]
        stock = nn.Module.to(_model("qwen3", torch.float64), world.device)
        split = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        lie = [(p.placements, p.to_local().shape) for p in split.values()]
        return error(logits, stock(input_ids=ids[None]).logits[0]), lie, {*split}


def test_logits_are_whole_and_slices_are_even() -> None:
    layers = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    names = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in layers} | {"model.embed_tokens.weight"}
    for logits, lie, split in run_ranks(_look, 2):
        assert logits < 1e-12
        assert ((Shard(0),), (EVEN // 2, 32)) in lie and ((Shard(1),), (32, 24)) in lie
        assert split == names and len(lie) == len(names)


def _odd_width(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        for name, shape in {"gate_proj": (49, 32), "up_proj": (49, 32), "down_proj": (32, 49)}.items():
            setattr(layer.mlp, name, nn.Linear(shape[1], shape[0], bias=False))


def _add(name: str, module: nn.Module) -> Callable[[PreTrainedModel], object]:
    return lambda model: model.model.set_submodule(name, module)


TWO_OF_TP = Layout(ranks=4, tp=2)
AS_IT_IS = nn.Module.train
ADAPTER, NORM = _add("layers.1.adapter", nn.Sequential(nn.Linear(32, 32))), _add("embed_norm", nn.LayerNorm(32))
REFUSED: list[tuple[Layout, str, Callable[[PreTrainedModel], object], bool, str]] = [
    (Layout(ranks=4, tp=4), "llama", AS_IT_IS, False, r"tp 4 does not divide 2 \(key/value heads\) .* use tp 1 or 2"),
    (TWO_OF_TP, "llama", _odd_width, False, r"49 \(width of model.layers.\*.mlp.gate_proj\).* use tp 1"),
    (
        TWO_OF_TP,
        "llama",
        lambda model: setattr(model.config, "base_model_tp_plan", {"layers.*.mlp.gate_proj": "mla_kv_a_proj"}),
        False,
        "style 'mla_kv_a_proj' of model.layers.0.mlp.gate_proj is not",
    ),
    (TWO_OF_TP, "llama", ADAPTER, True, r"model.layers.1.adapter \(Sequential\) has no place in a sequence"),
    (TWO_OF_TP, "llama", NORM, True, r"outside its .* \(embed_norm.weight, embed_norm.bias\)"),
    (TWO_OF_TP, "nanochat", AS_IT_IS, True, "calls norm 2 times .*, as norm, layers.0, layers.1, norm;"),
    (Layout(ranks=4), "llama", AS_IT_IS, True, "sequence_parallel splits rows over .* the home has tp 1"),
]


def test_what_tp_does_not_fit_is_refused() -> None:
    for home, family, change, rows, says in REFUSED:
        model, world = _model(family, SINGLE), cast(Any, SimpleNamespace(home=home))
        change(model)
        with pytest.raises(ModelError, match=says):
            TensorParallelFeature(Call(model, model, world, PrepareOptions(sequence_parallel=rows))).refuse(model)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Normed(Gain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.square().mean(-1, keepdim=True).sqrt())


def _gain_of_the_input(mlp: nn.Module) -> None:
    inner, gain = mlp.forward, Gain()
    mlp.gain, mlp.forward = gain, lambda x: inner(gain(x)) + gain(x)


NOT_A_SUM: dict[str, Callable[[Any], object]] = {
    "mlp.act_fn.gain": lambda layer: setattr(layer.mlp, "act_fn", Normed()),
    "mlp.act_fn.weight": lambda layer: setattr(layer.mlp, "act_fn", nn.RMSNorm(48)),
    "mlp.gain.gain": lambda layer: _gain_of_the_input(layer.mlp),
    "self_attn.gain": lambda layer: layer.self_attn.register_parameter("gain", nn.Parameter(torch.ones(4))),
}


@pytest.mark.parametrize("name", NOT_A_SUM)
@pytest.mark.parametrize("packed", [False, True])
def test_a_parameter_whose_gradient_would_not_be_a_sum_is_refused(name: str, packed: bool) -> None:
    model = tiny("llama")
    NOT_A_SUM[name](model.get_submodule("model.layers.1"))
    styles = [x._replace(style=PACKED) if packed and x.style == COLWISE else x for x in list_styles(model)]
    with pytest.raises(ModelError, match=rf"model.layers.1.{name} \(\w+\) is not in the .* plan of LlamaForCausalLM"):
        refuse_unnamed_parameters(model, styles)


# ---- features that depend on each other

BETWEEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "gated": (lambda gate, up: F.silu(gate) * up, False),
    "without a gate": (lambda gate, up: F.relu(up).square(), False),
    "threshold over all features": (lambda gate, up: F.relu(gate - gate.mean(-1, keepdim=True)) * up, True),
    "normed": (lambda gate, up: F.rms_norm(gate, gate.shape[-1:]) * up, True),
    "halves of one linear": (lambda gate, up: gate.chunk(2, -1)[0] * gate.chunk(2, -1)[1], True),
}


class _Block(nn.Module):
    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], device: str) -> None:
        super().__init__()
        self.between = between
        self.gate, self.up, self.down = (nn.Linear(a, b, device=device) for a, b in ((6, 10), (6, 10), (10, 6)))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.between(self.gate(hidden), self.up(hidden)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", BETWEEN)
def test_mixed_features_are_found(name: str, device: str) -> None:
    between, mixed = BETWEEN[name]
    block = _Block(between, device)
    styles = {id(block.gate): COLWISE, id(block.up): COLWISE, id(block.down): ROWWISE}
    assert mixes_features(block, styles) is mixed
    assert "forward" not in vars(block.gate) and block.down.weight.device.type == device


def test_gemma3n_is_refused_before_anything_is_split() -> None:
    config = pytest.importorskip("transformers.models.gemma3n").Gemma3nTextConfig()
    model = make_tiny_model(shrink_configuration(config), torch.float32)
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp \(Gemma3nTextMLP\) computes from all its features .* use tp 1"
    ):
        refuse_mixed_features(model, list_styles(model))

"""Mixture-of-experts models under a home equal the stock model document by document, losses of routers included."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from longspan.comm import World, bind
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.experts.experts import Loads, run_experts
from longspan.model.experts.moe import IMPLEMENTATION
from longspan.model.experts.router import RouterCoefficients, RouterLosses
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import StepResult, run_step
from tests.model.experts.moe_models import MoeStock, moe_answer, moe_model
from tests.model.stock import gradients_of, prepare_untried, texts, tiny, worst

LENGTHS = (13, 1, 30, 7, 2, 18)
WEIGHTS = RouterCoefficients(balance=0.5, z=0.1)
NONE = RouterCoefficients(balance=0.0)
FAMILIES = ("qwen3-moe", "gpt-oss", "mixtral", "olmoe", "deepseek-v3")
MODELS = [(family, dtype) for family in FAMILIES for dtype in (torch.float64, torch.float32)]
MODELS.remove(("deepseek-v3", torch.float64))  # its router computes in float32 always
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def idle_slots(home: Layout) -> Plan:
    """Slot 1 has nothing in the first micro-batch, the last one is a dummy for all."""
    everyone = tuple(range(home.slots))
    first = MicroBatch((Group((0,), (0, 1), (13, 1)),))
    second = MicroBatch((Group(everyone, (2, 3), (30, 7)), Group((0,), (4,), (2,)), Group((1,), (5,), (18,))))
    return Plan(home.slots, LENGTHS, (first, second, MicroBatch()), targets=sum(LENGTHS) - len(LENGTHS))


PLANS: dict[str, Callable[[Layout], Plan]] = {
    "cp 1": lambda home: plan_fixed(LENGTHS, home, cp=1),
    "cp 2, a few rows at a time": lambda home: plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=16),
    "dynamic": lambda home: plan_dynamic(LENGTHS, home, max_tokens_per_slot=20),
    "padded": lambda home: plan_padded(LENGTHS, home, cp=2, max_tokens_per_slot=32),
    "idle slots": idle_slots,
}
Case = tuple[str, torch.dtype, str]  # family, dtype, and what becomes of parameters and activations


@dataclass(frozen=True)
class Errors:
    """Relative to the stock model: the worst of all losses, of all gradients, and of their norm."""

    losses: float
    gradients: float
    norm: float

    def within(self, dtype: torch.dtype) -> bool:
        """Whether they are what rounding explains."""
        bound = TOLERANCE[dtype]
        return max(self.gradients, self.norm) < bound and self.losses < min(bound, 1e-6)


@cache
def _wanted(family: str, dtype: torch.dtype, device: torch.device) -> MoeStock:
    return moe_answer(moe_model(family, dtype), texts(LENGTHS), weights_of_family(family), device)


def weights_of_family(family: str) -> RouterCoefficients:
    """The losses of DeepSeek's routers are not known."""
    return NONE if family == "deepseek-v3" else WEIGHTS


def compare(rank: int, home: Layout, cases: Mapping[Case, Iterable[str]]) -> dict[tuple[Case, str], Errors]:
    """Errors of one step of every case under each of its plans."""
    errors, tried = {}, set[str]()
    with World(home, backend=backend()) as world:
        for case, plans in cases.items():
            family, dtype, kind = case
            model = (prepare_untried if family in tried else prepare)(
                moe_model(family, dtype),
                world,
                shard_parameters=kind != "copies",
                activation_checkpointing="selective" if kind == "selective" else kind == "recomputed",
                sequence_parallel=kind == "sequence-parallel",
            )
            tried.add(family)
            for name in plans:
                plan = replace(PLANS[name](home), row_multiple=home.tp)
                result = run_step(model, plan, texts(LENGTHS), world, router=weights_of_family(family))
                errors[case, name] = errors_of(result, gradients_of(model), _wanted(family, dtype, world.device))
                model.zero_grad()
    return errors


def errors_of(result: StepResult, gradients: dict[str, torch.Tensor], stock: MoeStock) -> Errors:
    """Of one step."""
    losses = [abs(result.loss / stock.loss - 1)]
    if result.router is not None:
        losses.append(abs(result.router.balance / stock.balance - 1))
        losses.append(abs(result.router.z / stock.z - 1))
    norm = torch.cat([gradient.flatten() for gradient in stock.gradients.values()]).norm().item()
    assert result.grad_norm is not None
    return Errors(max(losses), worst(gradients, stock.gradients), abs(result.grad_norm / norm - 1))


CASES: list[Case] = [(family, dtype, "recomputed") for family, dtype in MODELS]
CASES += [("qwen3-moe", torch.float64, "copies"), ("gpt-oss", torch.float32, "copies")]
CASES += [("gpt-oss", torch.float64, "selective")]


def _plans(case: Case) -> tuple[str, ...]:
    """Every plan for two families in float64; for other cases that with idle slots and, in turn, one more."""
    if case[0] in FAMILIES[:2] and case[1:] == (torch.float64, "recomputed"):
        return tuple(PLANS)
    return "idle slots", tuple(PLANS)[CASES.index(case) % 4]


FEW = [case for case in CASES if case[1] == torch.float64 or case[0] == "deepseek-v3"]  # others with make test-all


@cache
def _results(family: str, few: bool) -> list[dict[tuple[Case, str], Errors]]:
    cases = [case for case in CASES if case[0] == family and (case in FEW) == few]
    return run_ranks(compare, 2, Layout(ranks=2), {case: _plans(case) for case in cases})


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[pytest.mark.whole] * (case not in FEW)) for case in CASES]
)
def test_equals_the_stock_model_with_all_experts_on_every_rank(case: Case) -> None:
    for answer in _results(case[0], case in FEW):
        of_plans = {plan: errors for (of, plan), errors in answer.items() if of == case}
        assert of_plans.keys() == set(_plans(case)) and len(of_plans) >= 2
        assert all(errors.within(case[1]) for errors in of_plans.values()), of_plans


def _defaults(rank: int) -> list[RouterLosses | None]:
    """What a step reports and adds by default, with the configuration's coefficient, in evaluation, without routers."""
    documents, plan = texts(LENGTHS), plan_fixed(LENGTHS, Layout(ranks=1), cp=1)
    with World(Layout(ranks=1), backend=backend()) as world:
        losses, shard = [], bind(plan.micro_batches[0], world)
        for with_logits, weight in ((False, 0.0), (True, 0.25)):
            stock = moe_model("qwen3-moe", torch.float64)
            stock.config.output_router_logits, stock.config.router_aux_loss_coef = with_logits, 0.25
            expected = moe_answer(
                moe_model("qwen3-moe", torch.float64), documents, replace(NONE, balance=weight), "cpu"
            )
            model = prepare(stock, world, shard_parameters=False)
            result = run_step(model, plan, documents, world)
            assert errors_of(result, gradients_of(model), expected).within(torch.float64)
            losses += [result.router, run_step(model, plan, documents, world, backward=False).router]
            with pytest.raises(ModelError, match="got output_router_logits=: a loss of the local rows"):
                ids = torch.zeros_like(shard.position_ids)
                model(input_ids=ids, position_ids=shard.position_ids, shard=shard, output_router_logits=True)
        for other in (prepare(tiny("qwen3"), world), prepare(moe_model("deepseek-v3", torch.float32), world)):
            losses.append(run_step(other, plan, documents, world).router)
            with pytest.raises(ModelError, match="has no routers whose losses are known; set the balance and z"):
                run_step(other, plan, documents, world, router=WEIGHTS)
        return losses


def test_defaults_come_from_the_configuration() -> None:
    first, *others, dense, sigmoid = run_ranks(_defaults, 1)[0]
    assert first is not None and first.balance > 1 and others == [first] * 3
    assert dense is None and sigmoid is None


def test_a_layer_without_a_shard_is_refused() -> None:
    model = moe_model("qwen3-moe", torch.float32)
    model.set_experts_implementation(IMPLEMENTATION)
    with pytest.raises(ModelError, match=r"Qwen3MoeExperts got no shard.*call model\(..., shard=shard\)"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize("family", ("qwen3-moe", "gpt-oss"))  # the latter has biases
def test_experts_without_rows_read_no_counts_and_give_zeros(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of padding alone does not go through its experts one by one, nor wait for its device."""
    experts = next(m for m in moe_model(family, torch.float32).modules() if hasattr(m, "gate_up_proj"))
    x = torch.zeros(0, moe_model(family, torch.float32).config.hidden_size, requires_grad=True)
    monkeypatch.setattr(Loads, "host_counts", None)
    loads = Loads(torch.zeros(int(experts.num_experts), dtype=torch.int64))
    with torch.autocast("cpu", torch.bfloat16):
        assert run_experts(experts, x, loads).dtype == torch.bfloat16, "as the rows of other members have it"
    out = run_experts(experts, x, loads)
    out.sum().backward()
    assert out.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
    gradients = {name: weight.grad for name, weight in experts.named_parameters()}
    assert len(gradients) == (4 if family == "gpt-oss" else 2)
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values()), gradients

"""The norm of a step's gradients, clipping, what is not finite, and how often replicas of weights sum gradients."""

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.comm import World
from longspan.errors import ModelError, NonFiniteError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, clip_grad_norm, run_step
from longspan.train.step_end import clip_gradients, square_sum
from tests.model.deep import answer, deep
from tests.model.stock import error, gradients_of, prepare_untried, stock_answer, texts, tiny, weights_of, worst

LENGTHS = (13, 30, 7, 18)


def _world(ranks: int = 1, rank: int = 0, **degrees: int) -> Any:
    home = Layout(ranks=ranks, **degrees)
    device = torch.device("cpu")
    return SimpleNamespace(home=home, rank=rank, device=device, coordinates=home.coordinates(rank))


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Two with gradients of other sizes, one without."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((300, 7), (11,), (5,))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter, scale in zip(parameters[:2], (1.0, 0.01), strict=True):
            parameter.grad = (scale * torch.randn(parameter.shape, dtype=torch.float64)).to(dtype)
    return parameters


NORMS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}


@pytest.mark.parametrize("dtype", NORMS)
def test_norm_of_gradients_in_any_type(dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    wanted = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None]).norm().item()
    assert square_sum(parameters, _world()) ** 0.5 == pytest.approx(wanted, rel=NORMS[dtype])
    assert square_sum(parameters[2:], _world()) == 0.0


def test_plain_gradients_are_counted_by_the_first_rank_of_every_stage() -> None:
    home = {"ranks": 8, "pp": 2, "tp": 2}
    counting = [rank for rank in range(8) if square_sum(_parameters(torch.float32), _world(rank=rank, **home))]
    assert counting == [0, 4]


@pytest.mark.parametrize("dtype", NORMS)
@pytest.mark.parametrize("max_norm", [0.25, 1e6])
def test_clipping_rounds_once(dtype: torch.dtype, max_norm: float) -> None:
    parameters, norm = _parameters(dtype), 45.5
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    clip_gradients(parameters, max_norm, norm)
    factor = min(1.0, max_norm / (norm + 1e-6))
    for parameter, old in zip(parameters, before, strict=False):
        assert parameter.grad is not None
        wide = old if dtype == torch.float64 else old.float()
        assert torch.equal(parameter.grad, (wide * factor).to(dtype))
    assert parameters[2].grad is None


# ---- over ranks


def _frozen(stage: int, sharded: bool, dtype: torch.dtype) -> tuple[float, float]:
    """With a frozen pipeline stage: the norm, and the larger error of it and of the clipped gradients here."""
    documents = texts(LENGTHS)
    with World(Layout(ranks=4, pp=2), backend=backend(), timeout=60) as world:
        model = prepare_untried(deep("llama", dtype, layers=2), world, shard_parameters=sharded)
        trained = [name for name, _ in model.named_parameters() if world.coordinates.pp != stage]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        wanted = answer(deep("llama", torch.float64, layers=2), documents, world.device).gradients
        trained = {name for names in world.control.gather_objects(trained) for name in names}
        norm = torch.cat([wanted[name].flatten() for name in sorted(trained)]).norm().item()
        optimizer = build_optimizer(model, "sgd", lr=0.5)
        plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=16)
        result = run_step(model, plan, documents, world, optimizer, max_grad_norm=norm / 8)
        assert result.grad_norm is not None
        gradients = {name: gradient.double() for name, gradient in gradients_of(model).items()}
        assert bool(gradients) == (world.coordinates.pp != stage)
        factor = norm / 8 / (norm + 1e-6)
        far = max([0.0, *(error(gradient, factor * wanted[name]) for name, gradient in gradients.items())])
        return result.grad_norm, max(far, abs(result.grad_norm / norm - 1))


def _spoil_backward(model: nn.Module) -> None:
    """Add 0 to what an MLP gives, in a way whose derivative is not finite."""
    for name, module in model.named_modules():
        if name.endswith("layers.1.mlp"):
            module.register_forward_hook(lambda _, __, out: out + (0 * out).abs().sqrt())


def _spoil_loss(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name.endswith("layers.1.mlp"):
            module.register_forward_hook(lambda _, __, out: out * float("inf"))


def _spoil_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("layers.1.mlp.down_proj.weight"):
            parameter.data.mul_(float("inf"))


SPOILT = {
    "backward": (
        _spoil_backward,
        r"step 2: the loss is [\d.]+, the gradient norm nan; .* ranks \(0, 1, 2, 3\), .* up to",
    ),
    "loss": (_spoil_loss, "step 2: the loss is (inf|nan), .* lower the learning rate"),
    "weights": (
        _spoil_weights,
        r"were not finite before this step: ranks \(0, 1, 2, 3\), .*layers.1.mlp.down_proj.weight",
    ),
}


def _refused(home: Layout, spoil: str) -> tuple[str, bool]:
    """What a step that was not finite said, and whether weights and the optimizer's state stayed as they were."""
    documents = texts(LENGTHS)
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare_untried(deep("qwen3", torch.float32, layers=2), world)
        optimizer, plan = build_optimizer(model, "adamw"), plan_fixed(LENGTHS, home, cp=2)
        run_step(model, plan, documents, world, optimizer, step=1)
        SPOILT[spoil][0](model)
        before = weights_of(model), _moments(optimizer)
        with pytest.raises(NonFiniteError) as caught:
            run_step(model, plan, documents, world, optimizer, max_grad_norm=1.0, step=2)
        after = weights_of(model), _moments(optimizer)
        pairs = ((a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a)
        same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
        free = run_step(model, plan, documents, world)  # whoever has no optimizer here looks at the result
        return str(caught.value), same and not np.isfinite([free.loss, free.grad_norm or 0.0]).all()


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index} {name}": x.to_local().clone() if hasattr(x, "to_local") else x.clone()
        for index, state in optimizer.state_dict()["state"].items()
        for name, x in state.items()
    }


def _fail_once(model: nn.Module) -> None:
    calls = list[int]()

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("boom")

    model.get_submodule("model.layers.1").register_forward_pre_hook(fail)


def _summed(sharding: str, plans: str) -> tuple[int, float]:
    """All-reduces and errors of a step over two replicas, and another; "keep" comes after one that failed midway."""
    documents, pp = texts(LENGTHS), 2 if plans == "pipeline" else 1
    home = Layout(ranks=4, pp=pp, dp_replicate=2)
    with World(home, backend=backend(), timeout=60) as world:
        wanted = stock_answer("qwen3", torch.float64, documents, world.device).gradients
        model = prepare_untried(tiny("qwen3", torch.float64), world, reshard_after_forward=sharding == "reshard")
        plan = plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=16)
        if plans == "free":
            plan = plan_dynamic(LENGTHS, home, max_tokens_per_slot=16, mode="free")
        assert len(plan.micro_batches) > 1
        if (sharding, plans) == ("keep", "fixed"):
            _fail_once(model)
            with pytest.raises(ValueError, match="boom"):
                run_step(model, plan, documents, world)
            model.zero_grad()
        with _CountedAllReduces() as count:
            result = run_step(model, plan, documents, world)
            once = len(count)
        run_step(model, plan, documents, world)
        gradients = {name: gradient / 2 for name, gradient in gradients_of(model).items()}
        norm = torch.cat([g.flatten() for g in wanted.values()]).norm().item()
        assert result.grad_norm is not None
        here = {name: gradient for name, gradient in wanted.items() if name in gradients}
        return once, max(worst(gradients, here), abs(result.grad_norm / norm - 1))


class _CountedAllReduces:
    def __enter__(self) -> list[int]:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        self._module, calls = _fsdp_collectives, list[int]()

        class Counting:
            def __getattr__(self, name: str) -> Any:
                if name == "all_reduce":
                    calls.append(1)
                return getattr(dist, name)

        self._module.dist = Counting()
        return calls

    def __exit__(self, *_: object) -> None:
        self._module.dist = dist


FROZEN = [(0, True, torch.float32), (1, False, torch.float64)]
REFUSED = [(Layout(ranks=4), "backward"), (Layout(ranks=4), "weights"), (Layout(ranks=4, pp=2), "loss")]
SUMMED = [("reshard", "fixed"), ("keep", "fixed"), ("keep", "free"), ("keep", "pipeline")]
Found = tuple[list[tuple[float, float]], list[tuple[str, bool]], list[tuple[int, float]]]


@cache
def _found() -> list[Found]:
    return run_ranks(_look, 4)


def _look(rank: int) -> Found:
    return [_frozen(*case) for case in FROZEN], [_refused(*case) for case in REFUSED], [_summed(*c) for c in SUMMED]


def test_ranks_of_a_frozen_stage_have_the_same_norm_and_others_clip_exactly() -> None:
    for i, (_, _, dtype) in enumerate(FROZEN):
        answers = [frozen[i] for frozen, _, _ in _found()]
        assert len({norm.hex() for norm, _ in answers}) == 1, FROZEN[i]
        limit = 1e-12 if dtype == torch.float64 else 1e-5
        assert all(error < limit for _, error in answers), (FROZEN[i], answers)


def test_what_is_not_finite_reaches_no_weight() -> None:
    for i, (home, spoil) in enumerate(REFUSED):
        answers = [refused[i] for _, refused, _ in _found()]
        assert len({said for said, _ in answers}) == 1 and all(untouched for _, untouched in answers), (home, spoil)
        assert re.search(SPOILT[spoil][1], answers[0][0]), answers[0]


def test_replicas_sum_gradients_once_a_step() -> None:
    for i, case in enumerate(SUMMED):
        answers = [summed[i] for _, _, summed in _found()]
        groups = {"pipeline": 2}.get(case[1], 3)  # two layers and the rest; one layer and the rest
        assert all(count == groups and error < 1e-12 for count, error in answers), (case, answers)


# ---- clipping in a loop of one's own


def clip_rank(rank: int, home: Layout, family: str) -> tuple[float, float, bool]:
    """The norms of `run_step` with its own clipping and of `clip_grad_norm`, and whether weights come out the same."""
    documents = texts(LENGTHS)
    with World(home, backend=backend(), timeout=60) as world:
        plan = plan_dynamic(LENGTHS, home, max_tokens_per_slot=32, micro_batch_multiple=home.pp)
        norms, weights = [], []
        for own in (False, True):
            model = prepare_untried(deep(family, torch.float64, 2), world)
            optimizer = build_optimizer(model, "sgd", lr=0.5)
            if own:
                run_step(model, plan, documents, world)
                norms.append(clip_grad_norm(model, 0.1, world))
                optimizer.step()
            else:
                norms.append(run_step(model, plan, documents, world, optimizer, max_grad_norm=0.1).grad_norm)
            weights.append(weights_of(model))
        return norms[0], norms[1], all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("home", "family"),
    [
        (Layout(ranks=2, pp=2), "qwen3"),
        pytest.param(Layout(ranks=4, ep=2), "qwen3-moe", marks=pytest.mark.whole),
    ],
)
def test_own_clipping_is_that_of_a_step(home: Layout, family: str) -> None:
    answers = run_ranks(clip_rank, len(home.ranks), home, family)
    assert len({norm.hex() for pair in answers for norm in pair[:2]}) == 1 and answers[0][0] > 0.1
    assert all(same for _, _, same in answers)


def refuse_rank(rank: int) -> str:
    documents = texts(LENGTHS)
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = prepare(tiny("qwen3"), world, probe=False)
        with pytest.raises(ModelError, match="max_norm is 0; give a positive norm"):
            clip_grad_norm(model, 0, world)
        run_step(model, plan_fixed(LENGTHS, world.home, cp=2), documents, world)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert clip_grad_norm(model, float("inf"), world) > 0
        assert all(map(torch.equal, before, (p.grad for p in model.parameters() if p.grad is not None)))
        last = list(model.parameters())[-1]
        if rank == 1 and last.grad is not None:
            last.grad.mul_(float("nan"))
        before = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        with pytest.raises(NonFiniteError) as error:
            clip_grad_norm(model, 0.1, world)
        after = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
        return str(error.value)


def test_what_cannot_clip_is_refused_on_every_rank() -> None:
    (said,) = set(run_ranks(refuse_rank, 2))
    assert "the gradient norm is nan; weights and optimizer are as before the step. Weights are finite, and" in said

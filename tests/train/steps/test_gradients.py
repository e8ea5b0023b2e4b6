"""The norm of a step's gradients, clipping, what is not finite, and how often replicas of weights sum gradients."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers.modeling_layers import GradientCheckpointingLayer

from longspan.comm import World
from longspan.errors import ModelError, NonFiniteError
from longspan.layout import Layout
from longspan.model import fsdp_params, sharding as model_sharding
from longspan.model.fsdp_params import fsdp_modules, fsdp_param_groups
from longspan.model.pipeline import pipeline
from longspan.model.sharding import sum_gradients_over_slots
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan import plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, clip_grad_norm, run_step
from longspan.train.gradient_norm import gradient_square_sum, scale_to_norm
from tests.model.deep import answer, deep
from tests.model.stock import error, gradients_of, prepare_untried, stock_answer, texts, tiny, weights_of, worst

LENGTHS = (13, 30, 7, 18)


def _world(ranks: int = 1, rank: int = 0, **degrees: int) -> Any:
    home = Layout(ranks=ranks, **degrees)
    device = torch.device("cpu")
    return SimpleNamespace(home=home, rank=rank, device=device, coordinates=home.coordinates(rank))


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((300, 7), (11,), (5,))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter, scale in zip(parameters[:2], (1.0, 0.01), strict=True):
            parameter.grad = (scale * torch.randn(parameter.shape, dtype=torch.float64)).to(dtype)
    return parameters


NORMS = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}


@pytest.mark.parametrize("dtype", NORMS)
@pytest.mark.parametrize("max_norm", [0.25, 1e6])
def test_norms_of_gradients_in_any_type_and_clipping_that_rounds_once(dtype: torch.dtype, max_norm: float) -> None:
    parameters, norm = _parameters(dtype), 45.5
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    wanted = torch.cat([gradient.double().flatten() for gradient in before]).norm().item()
    assert gradient_square_sum(parameters, _world()) ** 0.5 == pytest.approx(wanted, rel=NORMS[dtype])
    scale_to_norm(parameters, max_norm, norm)
    factor = min(1.0, max_norm / (norm + 1e-6))
    for parameter, old in zip(parameters, before, strict=False):
        assert parameter.grad is not None
        wide = old if dtype == torch.float64 else old.float()
        assert torch.equal(parameter.grad, (wide * factor).to(dtype))
    assert parameters[2].grad is None and gradient_square_sum(parameters[2:], _world()) == 0.0


def test_plain_gradients_are_counted_by_the_first_rank_of_every_stage() -> None:
    home = {"ranks": 8, "pp": 2, "tp": 2}
    counting = [rank for rank in range(8) if gradient_square_sum(_parameters(torch.float32), _world(rank=rank, **home))]
    assert counting == [0, 4]


# ---- over ranks


def _frozen(ranks: int, stage: int, sharded: bool, dtype: torch.dtype) -> None:
    """With a frozen stage of a pipeline all ranks have the same norm, and the gradients of the others are clipped."""
    documents, limit = texts(LENGTHS), 1e-12 if dtype == torch.float64 else 1e-5
    with World(Layout(ranks, pp=2), backend=backend(), timeout=60) as world:
        model = prepare_untried(deep("llama", dtype, layers=2), world, shard_parameters=sharded)
        trained = [name for name, _ in model.named_parameters() if world.coordinates.pp != stage]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        wanted = answer(deep("llama", torch.float64, layers=2), documents, world.device).gradients
        trained = {name for names in world.control.gather_objects(trained) for name in names}
        norm = torch.cat([wanted[name].flatten() for name in sorted(trained)]).norm().item()
        optimizer = build_optimizer(model, "sgd", lr=0.5)
        plan = plan_fixed(LENGTHS, world.home, cp=ranks // 2, max_tokens_per_slot=64 // ranks)
        result = run_step(model, plan, documents, world, optimizer, max_grad_norm=norm / 8)
        assert result.grad_norm == pytest.approx(norm, rel=limit)
        assert len(set(world.control.gather_objects(result.grad_norm))) == 1
        gradients = {name: gradient.double() for name, gradient in gradients_of(model).items()}
        assert bool(gradients) == (world.coordinates.pp != stage)
        factor = norm / 8 / (norm + 1e-6)
        assert all(error(gradient, factor * wanted[name]) < limit for name, gradient in gradients.items())


SPOILT: dict[str, tuple[Callable[[Tensor], Tensor] | None, str]] = {  # what an MLP gives; None: its weights
    "backward": (  # plus 0, in a way whose derivative is not finite
        lambda out: out + (0 * out).abs().sqrt(),
        r"step 2: the loss is [\d.]+, the gradient norm nan; .* ranks \(0, 1\), .* up to",
    ),
    "loss": (lambda out: out * float("inf"), "step 2: the loss is (inf|nan), .* lower the learning rate"),
    "weights": (None, r"were not finite before this step: ranks \(0, 1\), .*layers.1.mlp.down_proj.weight"),
}


def _spoil(model: nn.Module, change: Callable[[Tensor], Tensor] | None) -> None:
    for name, module in model.named_modules():
        if name.endswith("layers.1.mlp"):
            if change is None:
                module.get_parameter("down_proj.weight").data.mul_(float("inf"))
            else:
                module.register_forward_hook(lambda _, __, out: change(out))


def _refused(home: Layout, spoil: str) -> None:
    """A step that is not finite says the same on every rank, and leaves weights and the optimizer's state."""
    documents = texts(LENGTHS)
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare_untried(deep("qwen3", torch.float32, layers=2), world)
        optimizer, plan = build_optimizer(model, "adamw"), plan_fixed(LENGTHS, home, cp=home.slots)
        run_step(model, plan, documents, world, optimizer, step=1)
        _spoil(model, SPOILT[spoil][0])
        before = weights_of(model) | _moments(optimizer)
        with pytest.raises(NonFiniteError, match=SPOILT[spoil][1]) as caught:
            run_step(model, plan, documents, world, optimizer, max_grad_norm=1.0, step=2)
        after = weights_of(model) | _moments(optimizer)
        assert all(torch.equal(before[name].nan_to_num(), x.nan_to_num()) for name, x in after.items())
        assert len(set(world.control.gather_objects(str(caught.value)))) == 1
        free = run_step(model, plan, documents, world)  # whoever has no optimizer here looks at the result
        assert not np.isfinite([free.loss, free.grad_norm or 0.0]).all()


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index} {name}": local_tensor(x).clone()
        for index, state in optimizer.state_dict()["state"].items()
        for name, x in state.items()
    }


def _summed(sharding: str, plans: str) -> None:
    """Two replicas sum gradients once a step, in which they are exact, also after a step that failed midway."""
    documents, pp = texts(LENGTHS), 2 if plans == "pipeline" else 1
    home = Layout(ranks=4, pp=pp, dp_replicate=2)
    with World(home, backend=backend(), timeout=60) as world:
        wanted = stock_answer("qwen3", torch.float64, documents, world.device)
        options = {"reshard_after_forward": sharding == "reshard", "sync_each_batch": sharding != "once"}
        model = prepare_untried(tiny("qwen3", torch.float64), world, **options)
        plan = plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=16)
        if plans == "free":
            plan = plan_dynamic(LENGTHS, home, max_tokens_per_slot=16, mode="free")
        assert len(plan.micro_batches) > 1
        if plans == "fixed":
            layer = model.get_submodule("model.layers.1")
            for backward in (False, True):
                second_fails = Mock(side_effect=chain([None, ValueError("boom")], repeat(None)))
                add_hook = layer.register_full_backward_hook if backward else layer.register_forward_pre_hook
                hook = add_hook(second_fails)
                with pytest.raises(ValueError, match="boom"):
                    run_step(model, plan, documents, world)
                hook.remove()
            flags = ((group.reduce_grads, group.all_reduce_grads) for group in fsdp_param_groups(fsdp_modules(model)))
            assert set(flags) == {(True, True)}  # a backward pass of one's own sums gradients
            model.zero_grad()
        with _CountedMessages() as count:
            result = run_step(model, plan, documents, world)
        groups = 2 if pp == 2 else 3  # two layers and the rest; one layer and the rest
        sums = groups * (len(plan.micro_batches) if (sharding, plans) == ("keep", "fixed") else 1)
        assert count["all_reduce"] == groups
        if pp == 1:  # in free mode layers are gathered again for the backward pass that closes a step
            assert (count["reduce_scatter"], count["all_gather"]) == (sums, groups + 2 * (plans == "free"))
        assert result.grad_norm == pytest.approx(wanted.norm, rel=1e-12)
        gradients = gradients_of(model)
        assert worst(gradients, {name: wanted.gradients[name] for name in gradients}) < 1e-12


def _with_and_without_hooks(mode: str, dtype: torch.dtype, casts: bool) -> None:
    """Passes that find parameters whole and sum nothing do without the hooks of blocks, and give the same bits."""
    layers, documents, options = 4, texts((16,) * 8), {"compute_dtype": torch.bfloat16} if casts else {}
    pp = 2 if mode == "pipeline" else 1
    with World(Layout(2, pp=pp), backend=backend(), timeout=60) as world:
        options |= {"reshard_after_forward": False, "sync_each_batch": False} if pp == 1 else {}
        model = prepare_untried(deep("qwen3", dtype, layers=layers), world, **options)
        if casts:
            model.get_submodule("model.layers.1").register_forward_hook(lambda _, __, out: out.float())
        plan = plan_dynamic(
            (16,) * 8, world.home, max_tokens_per_slot=16, mode="free" if mode == "free" else "lockstep"
        )
        blocks = [*fsdp_param_groups([x for x in fsdp_modules(model) if isinstance(x, GradientCheckpointingLayer)])]
        results, begun, unsummed = list[dict[str, Tensor]](), Counter[int](), list[int]()
        pre_forward, accumulate = FSDPParamGroup.pre_forward, fsdp_params.accumulate_gathered_gradients

        def begin(group: Any, *arguments: Any) -> Any:
            begun[len(results)] += group in blocks
            return pre_forward(group, *arguments)

        # torch 2.15 adds a gradient to the sum in float32 at once
        sums_in_place = hasattr(blocks[0], "_set_unsharded_grad_dtypes")

        def is_sum(gradient: Tensor) -> bool:
            return sums_in_place and gradient.dtype == torch.float32

        def add(groups: Any) -> None:
            wholes = [[parameter._unsharded_param.grad for parameter in group.fsdp_params] for group in blocks]
            unsummed.append(sum(any(x is not None and not is_sum(x) for x in whole) for whole in wholes))
            accumulate(groups)

        for patched in (
            nullcontext(),
            patch.object(model_sharding, "leave_out_idle_hooks", lambda *_, **__: nullcontext()),
        ):
            with (
                patched,
                patch.object(pipeline, "leave_out_idle_hooks", model_sharding.leave_out_idle_hooks),
                patch.object(FSDPParamGroup, "pre_forward", begin),
                patch.object(fsdp_params, "accumulate_gathered_gradients", add),
            ):
                run_step(model, plan, documents, world)
            results.append({name: gradient.clone() for name, gradient in gradients_of(model).items()})
            model.zero_grad()
        assert results[0].keys() == results[1].keys() and len(results[0]) > layers
        assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())
        passes = len(plan.micro_batches) + (mode == "free")  # with that of padding, which sums
        if pp == 2:  # those run with hooks that begin before the first one's backward pass
            assert (passes, begun[1]) == (8, layers // pp * passes)
            assert begun[0] == layers // pp * (pp - world.coordinates.pp) and max(unsummed) <= 2
            return
        assert passes > 3 and begun[1] == layers * passes
        loud = 1 if mode == "free" else 2
        assert begun[0] == layers * loud + (passes - loud if casts else 0)
        # those of a block without hooks are added when the next one has gradients; of the last one, by FSDP2
        assert max(unsummed) == (0 if sums_in_place else 2)
        assert len(unsummed) == (layers - 1 - casts) * (passes - loud)


def _sum_copies(rank: int) -> None:
    """Gradients in bfloat16 of copies that are not sharded are summed over four slots in more."""
    with World(Layout(4), backend=backend(), timeout=60) as world:
        module = nn.Linear(1000, 1, bias=False, dtype=torch.bfloat16, device=world.device)
        parts = [torch.randn(1, 1000, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]
        with sum_gradients_over_slots(module, world):
            module.weight.grad = parts[rank].to(world.device, copy=True)
        assert module.weight.grad is not None
        assert torch.equal(module.weight.grad.cpu(), torch.stack(parts).double().sum(0).bfloat16())


class _CountedMessages:
    def __enter__(self) -> Counter[str]:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        self._module, calls = _fsdp_collectives, Counter[str]()

        class Counting:
            def __getattr__(self, name: str) -> Any:
                calls[name.removesuffix("_single").removesuffix("_tensor").removesuffix("_into")] += 1
                return getattr(dist, name)

        self._module.dist = Counting()
        return calls

    def __exit__(self, *_: object) -> None:
        self._module.dist = dist


# ---- clipping in a loop of one's own


def _own_clipping(home: Layout, family: str) -> None:
    """`clip_grad_norm` says the norm of `run_step` with its own clipping, and weights come out the same."""
    documents = texts(LENGTHS)
    with World(home, backend=backend(), timeout=60) as world:
        plan = plan_dynamic(LENGTHS, home, max_tokens_per_slot=32, micro_batch_multiple=home.pp)
        norms, weights = [], []
        for own in (False, True):
            model = prepare_untried(deep(family, torch.float64, 2), world)
            optimizer = build_optimizer(model, "sgd", lr=0.5)
            for parameter in () if own else model.parameters():
                parameter.grad = torch.ones_like(parameter)  # left over from something else: zeroed by the step
            if own:
                run_step(model, plan, documents, world)
                norms.append(clip_grad_norm(model, 0.1, world))
                optimizer.step()
            else:
                norms.append(run_step(model, plan, documents, world, optimizer, max_grad_norm=0.1).grad_norm)
            weights.append(weights_of(model))
        assert len({norm for pair in world.control.gather_objects(norms) for norm in pair}) == 1 and norms[0] > 0.1
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def _what_cannot_clip(rank: int) -> None:
    documents = texts(LENGTHS)
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = prepare_untried(tiny("qwen3"), world)
        with pytest.raises(ModelError, match="max_norm is 0; give a positive norm"):
            clip_grad_norm(model, 0, world)
        run_step(model, plan_fixed(LENGTHS, world.home, cp=2), documents, world)
        before = [x.clone() for x in _local_gradients(model)]
        assert clip_grad_norm(model, float("inf"), world) > 0
        assert all(map(torch.equal, before, _local_gradients(model)))
        if rank == 1:
            for x in _local_gradients(model)[-1:]:
                x.mul_(float("nan"))
        before = [x.clone() for x in _local_gradients(model)]
        said = "the gradient norm is nan; weights and optimizer are as before the step. Weights are finite, and"
        with pytest.raises(NonFiniteError, match=said) as error:
            clip_grad_norm(model, 0.1, world)
        assert len(set(world.control.gather_objects(str(error.value)))) == 1
        pairs = zip(before, _local_gradients(model), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _local_gradients(model: nn.Module) -> list[Tensor]:
    return [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]


def _look(rank: int, ranks: int) -> None:
    if ranks == 4:
        _frozen(ranks, 0, True, torch.float32)
        for sharding, plans in (("reshard", "free"), ("keep", "fixed")):
            _summed(sharding, plans)
        _sum_copies(rank)
        return
    _with_and_without_hooks("free", torch.float32, True)  # pipelines and lockstep: with make test-all
    _frozen(ranks, 1, False, torch.float64)
    _refused(Layout(ranks), "backward")
    _own_clipping(Layout(ranks, ep=2), "qwen3-moe")
    _what_cannot_clip(rank)


def _look_at_more(rank: int, ranks: int) -> None:
    if ranks == 4:
        for sharding, plans in (("once", "fixed"), ("keep", "pipeline")):
            _summed(sharding, plans)
        return
    _with_and_without_hooks("lockstep", torch.bfloat16, False)
    _with_and_without_hooks("pipeline", torch.bfloat16, False)
    _refused(Layout(ranks), "weights")
    _refused(Layout(ranks, pp=2), "loss")
    _own_clipping(Layout(ranks, pp=2), "qwen3")


@pytest.mark.parametrize("look", [_look, pytest.param(_look_at_more, marks=pytest.mark.whole)])
def test_norms_clipping_what_is_not_finite_and_sums_of_replicas(look: Callable[[int, int], None]) -> None:
    for ranks in (2, 4):
        run_ranks(look, ranks, ranks)

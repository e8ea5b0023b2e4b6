"""The end of a step with its sums on the device, as on GPUs: nothing is read before the update; the same results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.errors import NonFiniteError, PlanError
from longspan.layout import Layout
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import gradient_norm, offload_optimizer_states, run_step, step, step_end
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.optimizer import build_optimizer
from tests.model.stock import prepare_untried, texts, tiny, weights_of

LENGTHS = (13, 1, 30, 7)
READS = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy")


@contextmanager
def _on_device(*, chosen: bool) -> Iterator[list[str]]:
    """Keep sums on the device or not; yields which values the host reads between the passes and the update."""
    reads, counting = list[str](), [False]

    def noting(name: str) -> Any:
        read = getattr(Tensor, name)

        def noted(x: Tensor, *arguments: Any, **named: Any) -> Any:
            if counting[0]:
                reads.append(name)
            return read(x, *arguments, **named)

        return noted

    def launch(*arguments: Any) -> Any:
        try:
            return launched(*arguments)
        finally:
            counting[0] = True

    def update(self: OnePassAdamW, *arguments: Any) -> Any:
        counting[0] = False
        return updated(self, *arguments)

    launched, updated = step.launch_passes, OnePassAdamW.step
    with pytest.MonkeyPatch.context() as patched:
        for name in READS:
            patched.setattr(Tensor, name, noting(name))
        patched.setattr(step, "launch_passes", launch)
        patched.setattr(OnePassAdamW, "step", update)
        of_mesh = gradient_norm._FirstCopies.__call__  # a mesh is a tensor of the host
        patched.setattr(gradient_norm._FirstCopies, "__call__", _uncounted(of_mesh, counting))
        patched.setattr(step_end, "sums_stay_on_device", lambda world: chosen)
        if chosen:
            patched.setattr(step_end, "_sum_over_channel", _uncounted(step_end._sum_over_channel, counting))
        yield reads


def _noting(events: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        events.append(name)
        return function(*arguments, **named)

    return noted


def _uncounted(function: Any, counting: list[bool]) -> Any:
    """What a backend of CPUs reads to exchange numbers is no read of a GPU."""

    def call(*arguments: Any) -> Any:
        counting[0] = False
        try:
            return function(*arguments)
        finally:
            counting[0] = True

    return call


def _opened(world: World, *, on_host: bool = False) -> tuple[nn.Module, Any]:
    model = prepare_untried(tiny("qwen3", torch.float32), world)
    optimizer = build_optimizer(model, lr=1e-2, weight_decay=0.1)
    return model, offload_optimizer_states(optimizer, world, bucket_bytes=1 << 12) if on_host else optimizer


def _contents(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    states = {f"{i}.{n}": x for i, s in enumerate(optimizer.state.values()) for n, x in s.items()}
    local = weights_of(model) | {n: getattr(x, "to_local", x.clone)() for n, x in states.items()}
    return {n: x.detach().to("cpu", copy=True) for n, x in local.items()}


def _same_results(home: Layout) -> None:
    with World(home, backend=backend(), timeout=60) as world:
        plan = plan_fixed(LENGTHS, home, cp=home.slots, max_tokens_per_slot=64)
        results, events = list[Any](), list[str]()
        for chosen, on_host in ((False, False), (True, home.tp == 1)):
            model, optimizer = _opened(world, on_host=on_host)
            with _on_device(chosen=chosen) as reads, pytest.MonkeyPatch.context() as patched:
                patched.setattr(step_end.HostCopy, "wait", _noting(events, "wait", step_end.HostCopy.wait))
                patched.setattr(OnePassAdamW, "step", _noting(events, "update", OnePassAdamW.step))
                host_work = partial(events.append, "meanwhile")
                named = {"optimizer": optimizer, "host_work": host_work}
                steps = [
                    run_step(model, plan, texts(LENGTHS, seed=i), world, max_grad_norm=norm, step=i + 1, **named)
                    for i, norm in enumerate((0.5, None, 1e6))
                ]
            assert bool(reads) != chosen, reads  # with sums on the host, the loss and the norm are read
            in_order = [name for name, _ in groupby(events)]  # moments on the host are updated in buckets
            assert in_order == (["update", "meanwhile", "wait"] if chosen else ["meanwhile", "update"]) * 3, in_order
            events.clear()
            results.append(([(s.loss, s.grad_norm) for s in steps], _contents(model, optimizer)))
        (figures, contents), *others = results
        assert all(norm > 0.5 for _, norm in figures), "gradients are clipped"
        for other_figures, other_contents in others:
            for a, b in zip(figures, other_figures, strict=True):
                assert a == pytest.approx(b, rel=1e-12)
            assert all(torch.allclose(contents[n], other_contents[n], rtol=1e-6, atol=1e-8) for n in contents)


def _not_taken() -> None:
    home = Layout(2)
    with World(home, backend=backend(), timeout=60) as world:
        plan = plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=64)
        for on_host in (False, True):
            model, optimizer = _opened(world, on_host=on_host)
            with _on_device(chosen=True):
                run_step(model, plan, texts(LENGTHS), world, optimizer, max_grad_norm=0.5, step=1)
                before = _contents(model, optimizer)
                with pytest.raises(NonFiniteError, match=r"step 2: the loss is nan, .* as before the step"):
                    run_step(model, plan, texts(LENGTHS), world, optimizer, loss=lambda x, at: x * torch.nan, step=2)
                assert all(map(torch.equal, before.values(), _contents(model, optimizer).values()))
                with pytest.MonkeyPatch.context() as patched, pytest.raises(PlanError, match=r"slots counted"):
                    patched.setattr(step_end, "NO_TARGET", -7)
                    run_step(model, plan, texts(LENGTHS), world, optimizer, step=3)
                assert all(map(torch.equal, before.values(), _contents(model, optimizer).values()))
                run_step(model, plan, texts(LENGTHS), world, optimizer, step=4)
            assert not all(map(torch.equal, before.values(), _contents(model, optimizer).values()))


def _look(rank: int) -> None:
    _same_results(Layout(2))
    _same_results(Layout(2, tp=2))
    _not_taken()


def test_nothing_is_read_before_the_update_and_a_step_that_is_not_taken_changes_nothing() -> None:
    run_ranks(_look, 2)

"""Plans in free mode, where slots run different numbers of micro-batches, over sharded parameters and over copies."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from longspan.comm import World
from longspan.layout import Layout
from longspan.model.sharding import fsdp_modules
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from longspan.train import passes as step_passes
from tests.model.stock import gradients_of, prepare_untried, stock_answer, texts, tiny, weights_of, worst

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9, 21, 3)
TARGETS = sum(LENGTHS) - len(LENGTHS)


def drawn(slots: int, seed: int) -> Plan:
    """Documents in random groups of random slots, in random micro-batches; some slots have many, some have none."""
    random = np.random.default_rng(seed)
    busy = np.sort(random.permutation(slots)[: max(1, slots - 1 - seed % 2)])
    batches: list[list[Group]] = [[] for _ in range(6)]
    order = random.permutation(len(LENGTHS)).tolist()
    while order:
        documents = tuple(order.pop() for _ in range(min(len(order), int(random.integers(1, 3)))))
        members = random.permutation(busy)[: int(random.integers(1, len(busy) + 1))]
        if random.random() < 0.4:  # more work for one slot than for others
            members = busy[:1]
        lengths = tuple(LENGTHS[d] for d in documents)
        batches[int(random.integers(0, 6))].append(Group(tuple(members.tolist()), documents, lengths))
    batches = [*batches[:3], [], *batches[3:]]
    return Plan(slots, LENGTHS, tuple(MicroBatch(tuple(groups)) for groups in batches), TARGETS, mode="free").check()


def alone(slots: int) -> Plan:
    """Everything on the last slot: the others have nothing at all."""
    batches = [MicroBatch((Group((slots - 1,), (d,), (n,)),)) for d, n in enumerate(LENGTHS)]
    return Plan(slots, LENGTHS, tuple(batches), TARGETS, mode="free").check()


def plans(slots: int) -> dict[str, Plan]:
    home = Layout(ranks=slots)
    found = {f"drawn {seed}": drawn(slots, seed) for seed in range(3)} | {"alone": alone(slots)}
    found["dynamic"] = plan_dynamic(LENGTHS, home, max_tokens_per_slot=16, mode="free")
    found["lockstep"] = plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=16)  # in between
    return found | {"fixed": replace(plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=32), mode="free")}


def micro_batches_of_slots(plan: Plan) -> list[int]:
    return [sum(bool(batch.groups_of(slot)) for batch in plan.micro_batches) for slot in range(plan.slots)]


@pytest.mark.parametrize("slots", [4, 8])
def test_slots_of_the_plans_have_different_work(slots: int) -> None:
    counts = [micro_batches_of_slots(plan) for name, plan in plans(slots).items() if name.startswith("drawn")]
    assert all(max(count) - min(count) > 1 and min(count) == 0 for count in counts), counts


def _errors(rank: int, home: Layout, options: list[dict[str, object]]) -> dict[tuple[int, str], float]:
    """The worst error of losses and gradients of every plan, and of some for other ways to prepare a model."""
    documents, found = texts(LENGTHS), {}
    with World(home, backend=backend(), timeout=60) as world:
        wanted = stock_answer("qwen3", torch.float64, documents, world.device)
        for i, option in enumerate(options):
            model = prepare_untried(tiny("qwen3", torch.float64), world, **option)  # pyright: ignore[reportArgumentType]
            chosen = plans(home.slots)
            for name in chosen if i == 0 else ("drawn 1", "alone"):
                plan = chosen[name]
                seen = run_step(model, plan, documents, world, backward=False)
                result = run_step(model, plan, documents, world)
                losses = max(abs(x.loss / wanted.loss - 1) for x in (seen, result))
                found[i, name] = max(losses, worst(gradients_of(model), wanted.gradients))
                model.zero_grad()
                assert all(isinstance(p, DTensor) for p in model.parameters()) or not option.get(
                    "shard_parameters", True
                )
    return found


WAYS: list[dict[str, object]] = [{}, {"shard_parameters": False}, {"activation_checkpointing": "selective"}]


@pytest.mark.whole
def test_losses_and_gradients_over_four_slots() -> None:
    for found in run_ranks(_errors, 4, Layout(ranks=4), [*WAYS, {"reshard_after_forward": False}]):
        assert max(found.values()) < 1e-12, found


def test_losses_and_gradients_of_replicas() -> None:
    for found in run_ranks(_errors, 4, Layout(ranks=4, dp_replicate=2), WAYS[:1]):
        assert max(found.values()) < 1e-12, found


@pytest.mark.whole
def test_losses_and_gradients_over_eight_slots() -> None:
    for found in run_ranks(_errors, 8, Layout(ranks=8), WAYS[:1]):
        assert max(found.values()) < 1e-12, found


def _trained(world: World, make: Callable[[int], Plan]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = prepare_untried(tiny("llama"), world)
    optimizer = build_optimizer(model, "sgd", lr=0.1)
    losses = [
        run_step(model, make(i), texts(LENGTHS, seed=i), world, optimizer, max_grad_norm=1.0).loss for i in range(4)
    ]
    assert fsdp_modules(model)
    return losses, weights_of(model)


def _steps(rank: int) -> tuple[float, float]:
    """Differences of losses and weights between steps in free mode and in lockstep."""
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        free = _trained(world, lambda i: drawn(2, i) if i % 2 else alone(2))
        lockstep = _trained(world, lambda i: plan_fixed(LENGTHS, world.home, cp=1))
    return max(abs(a / b - 1) for a, b in zip(free[0], lockstep[0], strict=True)), worst(free[1], lockstep[1])


def test_steps_of_an_optimizer_are_those_of_lockstep() -> None:
    for losses, weights in run_ranks(_steps, 2):
        assert losses < 1e-6 and weights < 1e-5


class _StopError(Exception):
    pass


def _after_an_error(rank: int) -> float:
    """The worst difference of gradients of a step after a broken one in free mode, from those of a step alone."""
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        docs, found, loss = texts(LENGTHS), list[dict[str, torch.Tensor]](), step_passes._batch_loss
        lockstep = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=32)
        for broken in (False, True):
            model = prepare_untried(tiny("qwen3", torch.float64), world)
            if broken:
                calls = iter(range(100))

                def stop(*args: Any, calls: Iterator[int] = calls) -> torch.Tensor:
                    if next(calls) == 2:
                        raise _StopError
                    return loss(*args)

                run_step(model, lockstep, docs, world)  # gradients are in place
                with patch.object(step_passes, "_batch_loss", stop), pytest.raises(_StopError):
                    run_step(model, plans(2)["fixed"], docs, world)
                model.zero_grad()
            run_step(model, lockstep, docs, world)
            found.append(gradients_of(model))
        return worst(found[1], found[0])


def test_an_error_leaves_no_gradients_to_the_next_step() -> None:
    assert max(run_ranks(_after_an_error, 2)) < 1e-12

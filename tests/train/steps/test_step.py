"""`run_step`: one path for training and evaluation, whose results do not depend on the plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from longspan.comm import World
from longspan.errors import CommError, DataError, LongspanError, ModelError, PlanError
from longspan.layout import Layout
from longspan.model.fsdp_params import fsdp_modules
from longspan.model.marks import refuse_other_parameters
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, passes as step_passes, run_step
from longspan.train.step_inputs import check_update_arguments
from tests.model.stock import VOCABULARY, gradients_of, prepare_untried, stock_answer, texts, tiny, weights_of, worst

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
TARGETS = sum(LENGTHS) - len(LENGTHS)
SLOTS = 4
HOME = Layout(ranks=SLOTS)


def by_hand() -> Plan:
    """Slot 0 has a document of its own and a slice of another, slot 3 is in no group, then all share two documents."""
    first = MicroBatch((Group((0,), (0,), (13,)), Group((0, 2, 1), (2, 1), (30, 1)), Group((1,), (3,), (7,))))
    second = MicroBatch((Group((3, 1, 0, 2), (5, 4), (18, 2), cp_comm_type="all_gather"), Group((2,), (6,), (5,))))
    third = MicroBatch((Group((1, 3), (7,), (9,), partition="contiguous"),))
    return Plan(SLOTS, LENGTHS, (first, second, third, MicroBatch()), targets=TARGETS)


def drawn(slots: int, seed: int) -> Plan:
    """In free mode: documents in random groups of random slots, in micro-batches of which some slots have none."""
    random, batches = np.random.default_rng(seed), list[list[Group]]([] for _ in range(7))
    busy = np.sort(random.permutation(slots)[: max(1, slots - 1 - seed % 2)])
    order = random.permutation(len(LENGTHS)).tolist()
    while order:
        documents = tuple(order.pop() for _ in range(min(len(order), int(random.integers(1, 3)))))
        members = random.permutation(busy)[: int(random.integers(1, len(busy) + 1))]
        if random.random() < 0.4:  # more work for one slot than for others
            members = busy[:1]
        group = Group(tuple(members.tolist()), documents, tuple(LENGTHS[d] for d in documents))
        batches[(0, 1, 2, 4, 5, 6)[int(random.integers(0, 6))]].append(group)
    return Plan(slots, LENGTHS, tuple(MicroBatch(tuple(groups)) for groups in batches), TARGETS, mode="free").check()


def alone(slots: int) -> Plan:
    """In free mode, everything on the last slot: the others have nothing at all."""
    batches = [MicroBatch((Group((slots - 1,), (d,), (n,)),)) for d, n in enumerate(LENGTHS)]
    return Plan(slots, LENGTHS, tuple(batches), TARGETS, mode="free").check()


def plans(lengths: Sequence[int], home: Layout) -> dict[str, Plan]:
    slots, narrow = home.slots, 1 if home.slots < 4 else 2
    some_idle = MicroBatch(tuple(Group((slots - 1,), (d,), (n,)) for d, n in enumerate(lengths)))
    of_any_home = {
        "fixed": plan_fixed(lengths, home, cp=slots, max_tokens_per_slot=16 if slots > 1 else 32),
        "padded": plan_padded(lengths, home, cp=narrow, max_tokens_per_slot=32),
        "dynamic": plan_dynamic(lengths, home, max_tokens_per_slot=32 if slots < 4 else 8),
        "free": plan_dynamic(lengths, home, max_tokens_per_slot=32, mode="free"),
        "idle": Plan(slots, tuple(lengths), (MicroBatch(), some_idle, MicroBatch()), TARGETS),
    }
    if slots not in (SLOTS, 8) or tuple(lengths) != LENGTHS:
        return of_any_home
    draws = range(1 if home.dp_replicate > 1 else 3)
    of_any_home |= {f"drawn {seed}": drawn(slots, seed) for seed in draws} | {"alone": alone(slots)}
    if slots != SLOTS:
        fixed = plan_fixed(lengths, home, cp=1, max_tokens_per_slot=32)
        return of_any_home | {"free, cp 1": replace(fixed, mode="free")}
    return of_any_home | {
        "even rows": plan_fixed(lengths, home, cp=4, row_multiple=2, cp_comm_type="all_gather"),
        "by hand": by_hand(),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "copies": {"shard_parameters": False},
    "recomputed": {"activation_checkpointing": "selective"},
    "gathered once": {"reshard_after_forward": False},
    "summed once": {"reshard_after_forward": False, "sync_each_batch": False},
}
Errors = dict[tuple[torch.dtype, str, str], tuple[float, ...]]


TURNED = (3, 0, 7, 2, 1, 6, 5, 4)  # another order of the documents


def _errors(
    rank: int, home: Layout, given: dict[str, Plan], turned: dict[str, Plan]
) -> tuple[Errors, dict[str, float]]:
    found, rows = Errors(), dict[str, float]()
    ways: list[tuple[torch.dtype, str, Sequence[str]]] = [
        (torch.float32, "sharded", ("fixed",)),
        (torch.float64, "sharded", ()),
        (torch.float64, "in another order", ("dynamic",)),
        (torch.float64, "copies", ("by hand", "alone") if home.dp_replicate > 1 else ()),
    ]
    if home == HOME:
        ways += [(torch.float64, way, ("drawn 1", "alone")) for way in OPTIONS if way != "copies"]
    elif home.slots != SLOTS:
        ways.pop()
    with World(home, backend=backend(), timeout=60) as world:
        dtypes = (torch.float32, torch.float64)
        exact = {dtype: stock_answer("qwen3", dtype, texts(LENGTHS), world.device) for dtype in dtypes}
        for dtype, way, names in ways:
            documents, chosen = texts(LENGTHS), given
            wanted = exact[dtype]
            norm = torch.cat([g.flatten() for g in wanted.gradients.values()]).norm().item()
            if way == "in another order":
                documents, chosen = [documents[d] for d in TURNED], turned
            else:
                model = prepare_untried(tiny("qwen3", dtype), world, **OPTIONS.get(way, {}))
            times = 0  # without an optimizer, gradients of the steps on copies add up
            for name in names or chosen:
                result, times = run_step(model, chosen[name], documents, world), times + 1
                assert result.grad_norm is not None and result.targets == TARGETS
                gradients = {n: g / times for n, g in gradients_of(model).items()}
                off = result.loss / wanted.loss - 1, result.grad_norm / times / norm - 1
                if name == "alone":
                    seen = run_step(model, chosen[name], documents, world, backward=False).loss
                    off = max(off[0], seen / wanted.loss - 1, key=abs), off[1]
                found[dtype, way, name] = (abs(off[0]), abs(off[1]), worst(gradients, wanted.gradients))
                rows[name] = result.rows
                if way != "copies":
                    model.zero_grad()
                    times = 0
    return found, rows


TURNED_HOME = Layout((2, 0, 3, 1), dp_replicate=2)
HOMES = {"4 in another order": TURNED_HOME, **{str(slots): Layout(slots) for slots in (2, 3, 4, 6, 8)}}
ROWS = [pytest.param(home, id=name, marks=[pytest.mark.whole] * name.isdigit()) for name, home in HOMES.items()]


@cache
def _answers(home: Layout) -> list[tuple[Errors, dict[str, float]]]:
    """Of one start, in which four ranks of another order also do what HOME alone shows."""
    orders = LENGTHS, tuple(LENGTHS[d] for d in TURNED)
    look = _on_four if home == TURNED_HOME else _errors
    return run_ranks(look, len(home.ranks), home, *(plans(lengths, home) for lengths in orders))


@pytest.mark.parametrize("home", ROWS)
def test_gradients_do_not_depend_on_the_plan(home: Layout) -> None:
    answers = _answers(home)
    for found, _ in answers:
        for case, errors in found.items():
            bounds = (1e-12,) * 3 if case[0] == torch.float64 else (1e-6, 1e-5, 1e-5)
            assert all(error < bound for error, bound in zip(errors, bounds, strict=True)), (case, errors)
    if home.slots == SLOTS:
        rows = {name: [int(of_rank[name]) for _, of_rank in answers] for name in ("by hand", "even rows")}
        assert sum(rows["by hand"]) == sum(LENGTHS) + 7 and all(n % 2 == 0 for n in rows["even rows"])


def _train(world: World, evaluate: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = prepare_untried(tiny("llama"), world)
    optimizer = build_optimizer(model, "adamw", lr=1e-2, weight_decay=0.1)
    narrow, train, evaluation = plan_fixed(LENGTHS, HOME, cp=1), list[float](), list[float]()
    for step in range(2):
        train.append(run_step(model, narrow, texts(LENGTHS, seed=step), world, optimizer, max_grad_norm=0.5).loss)
        for cp in (4, 1) if evaluate else ():
            wide = plan_fixed(LENGTHS, HOME, cp=cp, max_tokens_per_slot=40 // cp)
            result = run_step(model, wide, texts(LENGTHS, seed=99), world, backward=False)
            assert result.grad_norm is None and result.targets == TARGETS
            evaluation.append(result.loss)
    return train, evaluation, weights_of(model)


def _with_and_without_evaluation(world: World) -> None:
    """Evaluation at other degrees leaves training bit-identical."""
    alone, _, weights = _train(world, evaluate=False)
    between, evaluation, same = _train(world, evaluate=True)
    assert alone == between and all(torch.equal(weights[name], same[name]) for name in weights)
    assert evaluation[::2] == pytest.approx(evaluation[1::2], rel=1e-6)
    assert len(set(evaluation[::2])) == 2, "evaluation did not see the new weights"


class Mode(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        self.frozen = torch.nn.Dropout(0.5).eval()
        self.modes = list[tuple[bool, bool, bool]]()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, shard: object) -> torch.Tensor:
        self.modes.append((self.training, self.frozen.training, torch.is_grad_enabled()))
        return self.table(input_ids)


def _modes() -> None:
    with World(Layout(ranks=2, tp=2), backend=backend()) as world:
        model = Mode().to(world.device).train()
        model.frozen.eval()
        plan = plan_fixed(LENGTHS, world.home, cp=1)
        for backward in (True, False):
            run_step(model, plan, texts(LENGTHS), world, backward=backward)
        model.eval()
        run_step(model, plan, texts(LENGTHS), world)
    assert model.modes == [(True, False, True), (False, False, False), (True, True, True)]
    assert (model.training, model.frozen.training) == (False, False)
    with World(Layout(ranks=2, pp=2), backend=backend()) as world:
        stages, seen = prepare_untried(tiny("llama").eval(), world, shard_parameters=False), list[bool]()
        layer = stages.get_submodule(f"model.layers.{world.coordinates.pp}")
        layer.register_forward_pre_hook(lambda module, _: seen.append(module.training))
        run_step(stages, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world)
        assert all(seen) and seen and (stages.training, layer.training) == (False, False)


class Unreadable:
    def __len__(self) -> int:
        return 30

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        raise OSError("the disk is gone")


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


REFUSED: dict[str, tuple[dict[str, Any], type[LongspanError], str]] = {
    "token outside": (
        {"documents": lambda d: [*d[:2], np.append(d[2][:29], VOCABULARY), *d[3:]]},
        DataError,
        "document 2 holds token id 61 at position 29",
    ),
    "unreadable": (
        {"documents": lambda d: [*d[:2], Unreadable(), *d[3:]]},
        DataError,
        "rank . could not read its rows: OSError: the disk is gone",
    ),
    "another length": (
        {"documents": lambda d: [*d[:5], d[5][:-1], *d[6:]]},
        PlanError,
        "document 5 has 17 tokens, the plan laid out 18",
    ),
    "too few documents": ({"documents": lambda d: d[:7]}, PlanError, "8 documents, document 7 was not given"),
    "other targets": (
        {"plan": lambda p: replace(p, targets=70)},
        PlanError,
        "divides the loss by 70 targets, its 8 documents predict 77",
    ),
    "other slots": (
        {"plan": lambda p: plan_fixed(LENGTHS, Layout(ranks=2), cp=2)},
        PlanError,
        "the plan is for 2 slots, the home has 4",
    ),
    "optimizer in evaluation": (
        {"backward": False, "optimizer": lambda model, before: build_optimizer(model, "sgd")},
        ModelError,
        "leave out one of optimizer",
    ),
    "optimizer before prepare": (
        {"optimizer": lambda model, before: before},
        ModelError,
        r"the optimizer, SGD, holds 0 of the 24 parameters that Qwen3ForCausalLM trains, and 24 others, of which 24 "
        r"were its own before prepare replaced them \['model.embed_tokens.weight'\]; make the optimizer after prepare",
    ),
    "optimizer partly before prepare": (
        {"optimizer": lambda model, before: _sgd([*model.parameters(), *before.param_groups[0]["params"][:1]])},
        ModelError,
        "holds 24 of the 24 parameters that .* trains, and 1 other, of which 1 were its own before prepare replaced",
    ),
    "optimizer of others": (
        {"optimizer": lambda model, before: _sgd(torch.nn.Linear(2, 2).parameters())},
        ModelError,
        r"holds 0 of the 24 parameters that .* trains, and 2 others, of which 0 were its own .* \[\];",
    ),
    "unprepared": ({"model": "stock"}, ModelError, "Qwen3ForCausalLM was not prepared"),
    "plans of ranks": (
        {"degrees": (1, 2, 4, 4)},
        CommError,
        r"hold 3 different plans for step 0: ranks \(0\) hold .*ranks \(1\) hold ",
    ),
}


def _refusals(world: World) -> None:
    """Every rank refuses each bad input, and stays in step with the others, as no collective was entered."""
    stock = tiny("qwen3")
    before = torch.optim.SGD(stock.parameters())
    model = prepare_untried(stock, world)
    for change, kind, says in REFUSED.values():
        degree = change.get("degrees", (4,) * 4)[world.rank]
        plan = change.get("plan", lambda p: p)(plan_fixed(LENGTHS, HOME, cp=degree))
        documents = change.get("documents", lambda d: d)(texts(LENGTHS))
        optimizer = change["optimizer"](model, before) if "optimizer" in change else None
        used = tiny("qwen3") if change.get("model") else model
        with pytest.raises(kind, match=says) as caught:
            run_step(used, plan, documents, world, optimizer, change.get("backward", True))
        assert caught.type is kind
    afterwards = run_step(model, plan_fixed(LENGTHS, HOME, cp=2), texts(LENGTHS), world).loss
    assert len(set(world.control.gather_objects(afterwards))) == 1


def _on_four(rank: int, *given: Any) -> tuple[Errors, dict[str, float]]:
    with World(HOME, backend=backend(), timeout=30) as world:
        _with_and_without_evaluation(world)
        _refusals(world)
    return _errors(rank, *given)


def test_evaluation_leaves_training_bit_identical_and_bad_input_is_refused_on_every_rank() -> None:
    _answers(TURNED_HOME)


def test_sharded_and_plain_parameters_in_one_group_for_one_kernel_are_refused() -> None:
    with World(Layout(1), backend=backend()) as world:
        plain, sharded = (torch.nn.Parameter(torch.ones(2, device=world.device)) for _ in range(2))
        sharded = torch.nn.Parameter(DTensor.from_local(sharded.detach(), world.meshes.fsdp, [Shard(0)]))
        with pytest.raises(ModelError, match=r"group 0 of the optimizer has 1 sharded parameters and 1 plain ones"):
            check_update_arguments(torch.optim.SGD([plain, sharded], foreach=True), None, backward=True)
        check_update_arguments(torch.optim.SGD([plain, sharded], foreach=False), 1.0, backward=True)
        groups = [{"params": [plain]}, {"params": [sharded]}]
        check_update_arguments(torch.optim.SGD(groups, foreach=True), 1.0, backward=True)


def test_an_optimizer_may_hold_parameters_beside_the_models_and_is_looked_at_once() -> None:
    with World(Layout(1), backend=backend()) as world:
        model, head = prepare_untried(tiny("qwen3"), world), torch.nn.Linear(2, 2)
        last = [*model.parameters()][-1]
        for parameters in ([last], [last, *head.parameters()]):  # the others are trained by nobody, which is the user's
            before, optimizer = last.full_tensor().clone(), _sgd(parameters)
            run_step(model, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world, optimizer)
            assert not torch.equal(last.full_tensor(), before)
        with patch.object(model, "parameters", None):
            refuse_other_parameters(model, optimizer)
        last.requires_grad_(False)
        with pytest.raises(ModelError, match="holds 0 of the 23 parameters that Qwen3ForCausalLM trains, and 0 others"):
            refuse_other_parameters(model, _sgd([last]))
        model.requires_grad_(False)
        refuse_other_parameters(model, _sgd(head.parameters()))  # a frozen model has nothing to train


# ---- free mode, in which slots run different numbers of micro-batches


def _trained(world: World, make: Callable[[int], Plan]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = prepare_untried(tiny("llama"), world)
    optimizer = build_optimizer(model, "sgd", lr=0.1)
    losses = [
        run_step(model, make(i), texts(LENGTHS, seed=i), world, optimizer, max_grad_norm=1.0).loss for i in range(3)
    ]
    assert fsdp_modules(model)
    return losses, weights_of(model)


def _steps_in_free_mode() -> None:
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        free = _trained(world, lambda i: drawn(2, i) if i % 2 else alone(2))
        lockstep = _trained(world, lambda i: plan_fixed(LENGTHS, world.home, cp=1))
    assert free[0] == pytest.approx(lockstep[0], rel=1e-6) and worst(free[1], lockstep[1]) < 1e-5


class _StopError(Exception):
    pass


def _a_step_after_an_error() -> None:
    """A step that broke in free mode leaves no gradients to the next."""
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        docs, found, loss = texts(LENGTHS), list[dict[str, torch.Tensor]](), step_passes._batch_loss
        lockstep = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=32)
        free = replace(plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=32), mode="free")
        for broken in (False, True):
            model = prepare_untried(tiny("qwen3", torch.float64), world)
            if broken:
                calls = iter(range(100))

                def stop(*args: Any, calls: Iterator[int] = calls) -> torch.Tensor:
                    if next(calls) == 1:
                        raise _StopError
                    return loss(*args)

                run_step(model, lockstep, docs, world)  # gradients are in place
                with patch.object(step_passes, "_batch_loss", stop), pytest.raises(_StopError):
                    run_step(model, free, docs, world)
                model.zero_grad()
            run_step(model, lockstep, docs, world)
            found.append(gradients_of(model))
        assert worst(found[1], found[0]) < 1e-12


def _on_two(rank: int) -> None:
    _modes()
    _steps_in_free_mode()
    _a_step_after_an_error()


def test_modes_steps_in_free_mode_and_after_an_error() -> None:
    run_ranks(_on_two, 2)

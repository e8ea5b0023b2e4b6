"""`run_step`: one path for training and evaluation, whose results do not depend on the plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from longspan.comm import World
from longspan.errors import CommError, DataError, LongspanError, ModelError, PlanError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import Group, MicroBatch, Plan, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.stock import VOCABULARY, gradients_of, prepare_untried, stock_answer, texts, tiny, weights_of, worst

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
SLOTS = 4
HOME = Layout(ranks=SLOTS)


def by_hand() -> Plan:
    """Slot 0 has a document of its own and a slice of another, slot 3 is in no group, then all share two documents."""
    first = MicroBatch((Group((0,), (0,), (13,)), Group((0, 2, 1), (2, 1), (30, 1)), Group((1,), (3,), (7,))))
    second = MicroBatch((Group((3, 1, 0, 2), (5, 4), (18, 2), cp_comm_type="all_gather"), Group((2,), (6,), (5,))))
    third = MicroBatch((Group((1, 3), (7,), (9,), partition="contiguous"),))
    return Plan(SLOTS, LENGTHS, (first, second, third, MicroBatch()), targets=sum(LENGTHS) - len(LENGTHS))


PLANS: dict[str, Callable[[], Plan]] = {
    "cp 1": lambda: plan_fixed(LENGTHS, HOME, cp=1),
    "cp 2, a few rows at a time": lambda: plan_fixed(LENGTHS, HOME, cp=2, max_tokens_per_slot=16),
    "cp 4, a few rows at a time": lambda: plan_fixed(LENGTHS, HOME, cp=4, max_tokens_per_slot=8),
    "cp 4, all at once, even rows": lambda: plan_fixed(LENGTHS, HOME, cp=4, row_multiple=2, cp_comm_type="all_gather"),
    "padded": lambda: plan_padded(LENGTHS, HOME, cp=2, max_tokens_per_slot=32),
    "by hand": by_hand,
}


def _gradients(rank: int, home: Layout) -> dict[str, tuple[float, float, float, float]]:
    """Errors of loss, gradients and gradient norm of each plan; for each, the rows of this rank."""
    documents, found = texts(LENGTHS), {}
    with World(home, backend=backend()) as world:
        wanted = stock_answer("qwen3", torch.float64, documents, world.device)
        norm = torch.cat([g.flatten() for g in wanted.gradients.values()]).norm().item()
        for sharded in (True, False):
            model = prepare_untried(tiny("qwen3", torch.float64), world, shard_parameters=sharded)
            for name, make in PLANS.items():
                result = run_step(model, make(), documents, world)
                assert result.grad_norm is not None and result.targets == sum(LENGTHS) - len(LENGTHS)
                found[f"{name}{', sharded' if sharded else ''}"] = (
                    abs(result.loss / wanted.loss - 1),
                    worst(gradients_of(model), wanted.gradients),
                    abs(result.grad_norm / norm - 1),
                    result.rows,
                )
                model.zero_grad()
    return found


@pytest.mark.parametrize("dp_replicate", [2, pytest.param(1, marks=pytest.mark.whole)])
def test_gradients_do_not_depend_on_the_plan(dp_replicate: int) -> None:
    answers = run_ranks(_gradients, SLOTS, Layout(ranks=SLOTS, dp_replicate=dp_replicate))
    for answer in answers:
        for name, (loss, gradients, norm, _) in answer.items():
            assert max(loss, gradients, norm) < 1e-12, (name, answer[name])
    rows = {name: [int(answer[name][3]) for answer in answers] for name in PLANS}
    assert sum(rows["by hand"]) == sum(LENGTHS) + 7 and all(n % 2 == 0 for n in rows["cp 4, all at once, even rows"])


def _gradients_add_up(rank: int) -> tuple[float, float]:
    documents = texts(LENGTHS)
    errors = []
    with World(Layout(ranks=(2, 0, 3, 1)), backend=backend()) as world:  # the slots in another order than the ranks
        once = stock_answer("llama", torch.float64, documents, world.device).gradients
        wanted = {name: 2 * gradient for name, gradient in once.items()}
        for sharded in (True, False):
            model = prepare_untried(tiny("llama", torch.float64), world, shard_parameters=sharded)
            for cp in (1, 4):
                run_step(model, plan_fixed(LENGTHS, HOME, cp=cp), documents, world)
            errors.append(worst(gradients_of(model), wanted))
    return errors[0], errors[1]


def test_gradients_of_two_steps_add_up_without_an_optimizer() -> None:
    assert max(max(errors) for errors in run_ranks(_gradients_add_up, SLOTS)) < 1e-12


def _clipped(rank: int) -> list[float]:
    """Length of a step of plain SGD at rate 1, over the gradient norm that is allowed."""
    lengths = []
    with World(Layout(ranks=2), backend=backend()) as world:
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        for sharded, allowed in ((True, 0.01), (False, 0.01), (True, 1e9)):
            model = prepare_untried(tiny("qwen3", torch.float64), world, shard_parameters=sharded)
            before, optimizer = weights_of(model), build_optimizer(model, "sgd", lr=1.0)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)  # left over from something else: zeroed by the step
            norm = run_step(model, plan, texts(LENGTHS), world, optimizer, max_grad_norm=allowed).grad_norm
            assert norm is not None and 0.01 < norm < 1e9
            moved = torch.cat([(before[name] - w).flatten() for name, w in weights_of(model).items()]).norm().item()
            lengths.append(moved / min(allowed, norm))
    return lengths


def test_an_optimizer_step_is_clipped_to_the_norm() -> None:
    for ratios in run_ranks(_clipped, 2):
        assert ratios == pytest.approx([1.0] * 3, rel=1e-5)


STEPS = 20


def _curves(rank: int) -> dict[int, list[float]]:
    """Losses of SGD on the same tokens at each degree, with other micro-batches at each."""
    curves = {}
    with World(HOME, backend=backend()) as world:
        for cp in (1, 2, 4):
            model = prepare_untried(tiny("qwen3"), world)
            optimizer = build_optimizer(model, "sgd", lr=0.1)  # a rate at which rounding is not amplified
            plan = plan_fixed(LENGTHS, HOME, cp=cp, max_tokens_per_slot=64 // cp)
            curves[cp] = [
                run_step(model, plan, texts(LENGTHS, seed=i % 4), world, optimizer, step=i).loss for i in range(STEPS)
            ]
    return curves


@pytest.mark.whole
def test_sgd_curves_of_the_same_tokens_are_equal() -> None:
    curves = run_ranks(_curves, SLOTS)[0]
    assert sum(curves[1][-4:]) < 0.8 * sum(curves[1][:4]), "the model did not learn"
    for cp in (2, 4):
        np.testing.assert_allclose(curves[cp], curves[1], rtol=1e-5)


def _train(world: World, evaluate: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = prepare_untried(tiny("llama"), world)
    optimizer = build_optimizer(model, "adamw", lr=1e-2, weight_decay=0.1)
    narrow, train, evaluation = plan_fixed(LENGTHS, HOME, cp=1), list[float](), list[float]()
    for step in range(4):
        train.append(run_step(model, narrow, texts(LENGTHS, seed=step), world, optimizer, max_grad_norm=0.5).loss)
        for cp in (4, 2, 1) if evaluate else ():
            wide = plan_fixed(LENGTHS, HOME, cp=cp, max_tokens_per_slot=40 // cp)
            result = run_step(model, wide, texts(LENGTHS, seed=99), world, backward=False)
            assert result.grad_norm is None and result.targets == sum(LENGTHS) - len(LENGTHS)
            evaluation.append(result.loss)
    return train, evaluation, weights_of(model)


def _with_and_without_evaluation(rank: int) -> tuple[bool, list[float]]:
    with World(HOME, backend=backend()) as world:
        alone, _, weights = _train(world, evaluate=False)
        between, evaluation, same = _train(world, evaluate=True)
    return alone == between and all(torch.equal(weights[name], same[name]) for name in weights), evaluation


def test_evaluation_at_other_degrees_leaves_training_bit_identical() -> None:
    for identical, evaluation in run_ranks(_with_and_without_evaluation, SLOTS):
        assert identical
        for at_4, at_2, at_1 in zip(*[iter(evaluation)] * 3, strict=True):
            assert at_4 == pytest.approx(at_1, rel=1e-6) and at_2 == pytest.approx(at_1, rel=1e-6)
        assert len(set(evaluation[::3])) == 4, "evaluation did not see the new weights"


class Mode(torch.nn.Module):
    """A model of the caller's own, without transformers; remembers the mode that it ran in."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        self.frozen = torch.nn.Dropout(0.5).eval()
        self.modes = list[tuple[bool, bool, bool]]()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, shard: object) -> torch.Tensor:
        self.modes.append((self.training, self.frozen.training, torch.is_grad_enabled()))
        return self.table(input_ids)


def _modes(rank: int) -> tuple[list[tuple[bool, bool, bool]], tuple[bool, bool], list[bool]]:
    with World(Layout(ranks=2, tp=2), backend=backend()) as world:
        model = Mode().to(world.device).train()
        model.frozen.eval()
        plan = plan_fixed(LENGTHS, world.home, cp=1)
        for backward in (True, False):
            run_step(model, plan, texts(LENGTHS), world, backward=backward)
        model.eval()
        run_step(model, plan, texts(LENGTHS), world)
    with World(Layout(ranks=2, pp=2), backend=backend()) as world:
        stages, seen = prepare(tiny("llama").eval(), world, shard_parameters=False), list[bool]()
        layer = stages.get_submodule(f"model.layers.{world.coordinates.pp}")
        layer.register_forward_pre_hook(lambda module, _: seen.append(module.training))
        run_step(stages, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world)
        return model.modes, (model.training, model.frozen.training), [all(seen), stages.training, layer.training]


def test_modes_are_restored_and_a_module_in_evaluation_mode_stays_so_in_a_model_that_trains() -> None:
    for modes, afterwards, of_stages in run_ranks(_modes, 2):
        assert modes == [(True, False, True), (False, False, False), (True, True, True)]
        assert afterwards == (False, False) and of_stages == [True, False, False]


def outside(documents: list[np.ndarray]) -> list[np.ndarray]:
    documents[2][29] = VOCABULARY
    return documents


def one_short(documents: list[np.ndarray]) -> list[np.ndarray]:
    documents[5] = documents[5][:-1]
    return documents


class Unreadable:
    def __len__(self) -> int:
        return 30

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        raise OSError("the disk is gone")


REFUSED: dict[str, tuple[dict[str, Any], type[LongspanError], str]] = {
    "token outside": ({"documents": outside}, DataError, "document 2 holds token id 61 at position 29"),
    "unreadable": (
        {"documents": lambda d: [*d[:2], Unreadable(), *d[3:]]},
        DataError,
        "rank . could not read its rows: OSError: the disk is gone",
    ),
    "another length": ({"documents": one_short}, PlanError, "document 5 has 17 tokens, the plan laid out 18"),
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
    "optimizer in evaluation": ({"backward": False, "optimizer": True}, ModelError, "leave out one of optimizer"),
    "unprepared": ({"model": "stock"}, ModelError, "Qwen3ForCausalLM was not prepared"),
}


def _refusals(rank: int) -> dict[str, tuple[str, str]]:
    """What each bad input raises on this rank, in one world: the ranks stay in step, as no collective was entered."""
    found = {}
    with World(HOME, backend=backend(), timeout=30) as world:
        model = prepare(tiny("qwen3"), world)
        for name, (change, _, _) in REFUSED.items():
            plan = change.get("plan", lambda p: p)(plan_fixed(LENGTHS, HOME, cp=4))
            documents = change.get("documents", lambda d: d)(texts(LENGTHS))
            optimizer = build_optimizer(model, "sgd") if change.get("optimizer") else None
            used = tiny("qwen3") if change.get("model") else model
            try:
                run_step(used, plan, documents, world, optimizer, change.get("backward", True))
            except LongspanError as error:
                found[name] = (type(error).__name__, str(error))
        found["afterwards"] = ("", f"{run_step(model, plan_fixed(LENGTHS, HOME, cp=2), texts(LENGTHS), world).loss}")
    return found


def test_bad_input_is_refused_on_every_rank() -> None:
    answers = run_ranks(_refusals, SLOTS)
    assert len({answer["afterwards"] for answer in answers}) == 1
    for answer in answers:
        for name, (_, kind, says) in REFUSED.items():
            assert answer[name][0] == kind.__name__, (name, answer[name])
            with pytest.raises(kind, match=says):
                raise kind(answer[name][1])


def _different_plans(rank: int) -> str:
    with World(Layout(ranks=2), backend=backend(), timeout=30) as world:
        model = prepare(tiny("qwen3"), world)
        plan = plan_fixed(LENGTHS, world.home, cp=1 + rank)
        with pytest.raises(CommError) as caught:
            run_step(model, plan, texts(LENGTHS), world)
        return str(caught.value)


def test_ranks_that_hold_different_plans_are_told_so() -> None:
    assert all("plan" in message for message in run_ranks(_different_plans, 2))

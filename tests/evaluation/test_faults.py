"""Whatever goes wrong inside an evaluation, on any one rank: no trace is left, and no rank hangs or goes on alone."""

import itertools
import json
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.evaluation.evaluate import evaluate
from longspan.layout import Layout
from longspan.plan import Plan, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from longspan.train.plans import PlanChoice
from tests.evaluation.faults import ENDS, EVERY, KINDS, PLACES, TOGETHER, Fault, faulty
from tests.evaluation.state import differences, state_of
from tests.model.deep import deep
from tests.model.stock import prepare_untried, texts

RANKS, TIMEOUT = 4, 40.0
LENGTHS, HELD_OUT = (13, 1, 30, 7, 2, 18), texts((31, 2, 17, 9, 24, 12, 28), 5)
LAYOUTS = {"FSDP2": Layout(ranks=RANKS), "TP": Layout(ranks=RANKS, tp=2), "PP": Layout(ranks=RANKS, pp=2)}


class Suffered(NamedTuple):
    """What an evaluation ended with on one rank: its error, and what it changed; then what came after it."""

    error: str
    changed: list[str]
    after: list[float]  # losses of the next evaluation and training step


class Ready(NamedTuple):
    """A model in an open world after a step, with gradients that wait for the optimizer."""

    model: nn.Module
    optimizer: Optimizer
    world: World
    plan: Plan


def ready(world: World) -> Ready:
    layout = world.home
    model = prepare_untried(deep("qwen3", torch.float32, 2, 62), world)
    plan = plan_fixed(LENGTHS, layout, cp=2, max_tokens_per_slot=32, micro_batch_multiple=layout.pp)
    optimizer = build_optimizer(model, lr=0.01)
    run_step(model, plan, texts(LENGTHS), world, optimizer)
    run_step(model, plan, texts(LENGTHS), world)
    return Ready(model, optimizer, world, plan)


def evaluated(to: Ready, fault: Fault | None) -> float:
    """The loss of an evaluation in portions, which goes wrong as the fault says."""
    with faulty(fault, HELD_OUT, to.world.rank) as (documents, options):
        slots = to.world.home.slots
        choice = PlanChoice.fixed(slots, max_tokens_per_slot=-(-32 // slots))
        return evaluate(to.model, documents, choice, to.world, options).loss


def changed_by(to: Ready, fault: Fault | None) -> tuple[BaseException | None, list[str]]:
    """The error of an evaluation, and what it changed on this rank."""
    before, error = state_of(to.model, to.optimizer, to.world), None
    try:
        evaluated(to, fault)
    except BaseException as failure:
        error = failure
    return error, differences(before, state_of(to.model, to.optimizer, to.world))


def go_on(rank: int, layout: Layout, faults: list[Fault | None]) -> list[Suffered]:
    """Each fault, after which all ranks go on, with a model of its own."""
    suffered = list[Suffered]()
    with World(layout, backend=backend(), timeout=TIMEOUT) as world:
        for fault in faults:
            to = ready(world)
            error, changed = changed_by(to, fault)
            after = [evaluated(to, None), run_step(to.model, to.plan, texts(LENGTHS, 1), world, to.optimizer).loss]
            suffered.append(Suffered(f"{type(error).__name__}: {error}" if error else "", changed, after))
    return suffered


def stop(rank: int, layout: Layout, fault: Fault, folder: Path) -> None:
    """The fault, which ends this rank with what it changed in a file."""
    with World(layout, backend=backend(), timeout=TIMEOUT) as world:
        error, changed = changed_by(ready(world), fault)
        (folder / f"{rank}.json").write_text(json.dumps(changed))
        assert error is not None
        raise error


def check_going_on(layout: Layout, faults: list[Fault]) -> None:
    answers = run_ranks(go_on, RANKS, layout, [None, *faults], timeout=280)
    (unhurt, *_), *_ = answers
    assert unhurt.error == "" and all(answer[0] == unhurt for answer in answers)
    for fault, *suffered in zip(faults, *(answer[1:] for answer in answers), strict=True):
        assert len({s.error for s in suffered}) == 1, (fault, suffered)
        named = f"rank {fault.rank}" if fault.rank > 0 else ""  # the first rank's errors need not say so
        assert fault.text in suffered[0].error and named in suffered[0].error, suffered
        assert all(s.changed == [] and s.after == unhurt.after for s in suffered), (fault, suffered)


def check_stopping(layout: Layout, fault: Fault, folder: Path) -> None:
    kind, began = KINDS[fault.kind], time.monotonic()
    with pytest.raises(kind, match=fault.text) as raised:
        run_ranks(stop, RANKS, layout, fault, folder, timeout=TIMEOUT + 20)
    assert time.monotonic() - began < TIMEOUT
    notes = getattr(raised.value, "__notes__", [])
    said = [note for note in notes if f"rank {fault.rank} left with {kind.__name__}: {fault.text}" in note]
    assert len(said) == RANKS - 1, (fault, notes)
    changed = {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)}
    assert changed == {rank: [] for rank in range(RANKS)}, fault


ALL = [Fault(*values) for values in itertools.product(PLACES, KINDS, range(RANKS))]
ALL += [Fault(place, "error", rank) for place in ENDS for rank in range(RANKS)]
FEW = [Fault("forward pass of the last portion", "error", 3), Fault("reduction", "Ctrl-C", 0)]


def test_errors_that_all_ranks_learn_of_leave_the_model_as_it_was() -> None:
    faults = [Fault(place, "error", 2) for place in sorted(TOGETHER)[::2]]
    check_going_on(LAYOUTS["FSDP2"], [*faults, Fault("forward pass of the last portion", "Ctrl-C", EVERY)])


@pytest.mark.parametrize("fault", FEW, ids=str)
def test_other_faults_stop_all_ranks(fault: Fault, tmp_path: Path) -> None:
    check_stopping(LAYOUTS["FSDP2"], fault, tmp_path)


@pytest.mark.whole
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_fault(name: str, tmp_path: Path) -> None:
    """On every rank; what stops all ranks under TP and PP on ranks in turn. Metrics are the last stage's business."""
    measures = (2, 3) if name == "PP" else range(RANKS)
    faults = [fault for fault in ALL if fault.place != "metric" or fault.rank in measures]
    check_going_on(LAYOUTS[name], [fault for fault in faults if fault.together])
    for number, fault in enumerate(fault for fault in faults if not fault.together):
        if name == "FSDP2" or number % (RANKS + 1) == 0:
            folder = tmp_path / str(number)
            folder.mkdir()
            check_stopping(LAYOUTS[name], fault, folder)

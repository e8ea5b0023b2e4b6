"""Whatever goes wrong inside an evaluation, on any one rank: no trace is left, and no rank hangs or goes on alone."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.comm.control_group import ControlGroup
from longspan.evaluation import portions
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.layout import Layout
from longspan.model.seams import attention_calls
from longspan.plan import Plan, plan_fixed
from longspan.resolve.planner_config import PlannerConfig
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.evaluation.state import differences, state_of
from tests.model.deep import deep
from tests.model.stock import prepare_untried, texts

KINDS: dict[str, type[BaseException]] = {"error": ValueError, "Ctrl-C": KeyboardInterrupt}
PLACES = (
    "planning",
    "agreement on the plan",
    "reading",
    "reading of a later portion",
    "question whether to stop",
    "forward pass",
    "forward pass of the last portion",
    "metric",
    "progress",
    "reduction",
)
ENDS = ("stop",)  # not errors: an evaluation that is to end, by what one rank sees
TOGETHER = {"reading", "reading of a later portion", "metric", *ENDS}  # told to all; they go on
EVERY = -1
ERRORS = {"metric": "EvaluationError"}
ERRORS |= dict.fromkeys(ENDS, "EvaluationStopped") | dict.fromkeys(PLACES[2:4], "DataError")


@dataclass(frozen=True)
class Fault:
    """An error of one rank, or of EVERY rank, at one place of an evaluation."""

    place: str
    kind: str
    rank: int

    @property
    def together(self) -> bool:
        """Whether all ranks get the same error, and may go on."""
        return self.rank == EVERY or (self.kind == "error" and self.place in TOGETHER)

    @property
    def text(self) -> str:
        return f"boom in {self.place}"


@dataclass
class Trap:
    fault: Fault
    calls_before: int = 0
    calls: int = field(default=0, init=False)

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls > self.calls_before and self.fault.place not in ENDS:
            raise KINDS[self.fault.kind](self.fault.text)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*args: Any, **keywords: Any) -> Any:
            self()
            return function(*args, **keywords)

        return trapped

    def why(self) -> str:
        self()
        return self.fault.text if self.fault.place == "stop" and self.calls > 1 else ""


@dataclass(frozen=True)
class Document:
    tokens: np.ndarray
    trap: Trap | None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        if self.trap is not None:
            self.trap()
        return self.tokens[positions]


@contextmanager
def faulty(
    fault: Fault | None, documents: Sequence[np.ndarray], rank: int
) -> Iterator[tuple[list[Document], EvaluationOptions]]:
    """Documents and options of an evaluation in portions of two micro-batches, which goes wrong on the fault's rank."""
    place = fault.place if fault is not None and fault.rank in (rank, EVERY) else ""
    later = {"reading of a later portion": 5, "forward pass of the last portion": 5, "question whether to stop": 1}
    trap = Trap(fault, later.get(place, 0)) if fault is not None and place else None
    patches: dict[str, tuple[Any, str]] = {
        "planning": (PlannerConfig, "plan"),
        "agreement on the plan": (ControlGroup, "compare_digests"),
        "forward pass": (attention_calls, "attend"),
        "forward pass of the last portion": (attention_calls, "attend"),
        "reduction": (ControlGroup, "sum_array_over_ranks"),
    }
    options = EvaluationOptions(
        step=77,
        share_prefixes=False,
        metrics={"largest": trap.before(largest) if trap and place == "metric" else largest},
        stopped=trap.why if trap and place in ("question whether to stop", "stop") else lambda: "",
        progress=trap if trap and place == "progress" else None,
    )
    read = [Document(tokens, trap if place.startswith("reading") else None) for tokens in documents]
    with mock.patch.object(portions, "PORTION", 2):
        if trap is None or place not in patches:
            yield read, options
            return
        owner, name = patches[place]
        with mock.patch.object(owner, name, trap.before(getattr(owner, name))):
            yield read, options


def largest(rows: Any) -> tuple[Tensor, int]:
    return rows.logits.amax(-1).double().sum(), len(rows.targets)


RANKS, TIMEOUT = 4, 40.0
LENGTHS, HELD_OUT = (13, 1, 30, 7, 2, 18), texts((31, 2, 17, 9, 24, 12, 28), 5)
PAIR = Layout(ranks=2)
LAYOUTS = {"FSDP2": Layout(ranks=RANKS), "TP": Layout(ranks=RANKS, tp=2), "PP": Layout(ranks=RANKS, pp=2)}


class Suffered(NamedTuple):
    """What an evaluation ended with on one rank: its error, what it changed, and the loss of the next evaluation."""

    error: str
    changed: list[str]
    next_loss: float


class Ready(NamedTuple):
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
    with faulty(fault, HELD_OUT, to.world.rank) as (documents, options):
        slots = to.world.home.slots
        choice = PlannerConfig.fixed(slots, max_tokens_per_slot=-(-32 // slots))
        return evaluate(to.model, documents, choice, to.world, options).loss


def changed_by(to: Ready, fault: Fault | None) -> tuple[BaseException | None, list[str]]:
    before, error = state_of(to.model, to.optimizer, to.world), None
    try:
        evaluated(to, fault)
    except BaseException as failure:
        error = failure
    return error, differences(before, state_of(to.model, to.optimizer, to.world))


def go_on(rank: int, layout: Layout, faults: list[Fault]) -> tuple[list[Suffered], float, Suffered, float]:
    """Each fault, after which all ranks go on, and the loss of a step after them; then the same without faults."""

    def suffer(to: Ready, fault: Fault | None) -> Suffered:
        error, changed = changed_by(to, fault)
        return Suffered(f"{type(error).__name__}: {error}" if error else "", changed, evaluated(to, None))

    def train(to: Ready) -> float:
        return run_step(to.model, to.plan, texts(LENGTHS, 1), to.world, to.optimizer).loss

    with World(layout, backend=backend(), timeout=TIMEOUT) as world:
        hurt, unhurt = ready(world), ready(world)
        suffered = [suffer(hurt, fault) for fault in faults]
        return suffered, train(hurt), suffer(unhurt, None), train(unhurt)


def stop(rank: int, layout: Layout, fault: Fault, folder: Path) -> None:
    with World(layout, backend=backend(), timeout=TIMEOUT) as world:
        error, changed = changed_by(ready(world), fault)
        (folder / f"{rank}.json").write_text(json.dumps(changed))
        assert error is not None
        raise error


def check_going_on(layout: Layout, faults: list[Fault]) -> None:
    answers = run_ranks(go_on, len(layout.ranks), layout, faults, timeout=280)
    _, loss, unhurt, _ = answers[0]
    assert unhurt.error == "" and all(answer[1:] == (loss, unhurt, loss) for answer in answers), answers
    for fault, *suffered in zip(faults, *(answer[0] for answer in answers), strict=True):
        assert len({s.error for s in suffered}) == 1, (fault, suffered)
        named = f"rank {fault.rank}" if fault.rank > 0 else ""  # the first rank's errors need not say so
        assert fault.text in suffered[0].error and named in suffered[0].error, suffered
        kind = ERRORS.get(fault.place, "") if fault.kind == "error" else KINDS[fault.kind].__name__
        assert suffered[0].error.startswith(kind), suffered
        assert all(s.changed == [] and s.next_loss == unhurt.next_loss for s in suffered), (fault, suffered)


def check_stopping(layout: Layout, fault: Fault, folder: Path) -> None:
    kind, began, ranks = KINDS[fault.kind], time.monotonic(), len(layout.ranks)
    with pytest.raises(kind, match=fault.text) as raised:
        run_ranks(stop, ranks, layout, fault, folder, timeout=TIMEOUT + 20)
    assert time.monotonic() - began < TIMEOUT
    notes = getattr(raised.value, "__notes__", [])
    said = [note for note in notes if f"rank {fault.rank} left with {kind.__name__}: {fault.text}" in note]
    assert len(said) == ranks - 1, (fault, notes)
    changed = {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)}
    assert changed == {rank: [] for rank in range(ranks)}, fault


ALL = [Fault(*values) for values in itertools.product(PLACES, KINDS, range(RANKS))]
ALL += [Fault(place, "error", rank) for place in ENDS for rank in range(RANKS)]
FEW = [
    (LAYOUTS["FSDP2"], Fault("forward pass of the last portion", "error", 3)),
    (PAIR, Fault("reduction", "Ctrl-C", 0)),
]


def test_errors_that_all_ranks_learn_of_leave_the_model_as_it_was() -> None:
    places = ("metric", "reading of a later portion", "stop")
    faults = [Fault(place, "error", 1) for place in places]
    faults.append(Fault("forward pass of the last portion", "Ctrl-C", EVERY))
    check_going_on(PAIR, faults)


@pytest.mark.parametrize(("layout", "fault"), FEW, ids=["error", "Ctrl-C"])
def test_other_faults_stop_all_ranks(layout: Layout, fault: Fault, tmp_path: Path) -> None:
    check_stopping(layout, fault, tmp_path)


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

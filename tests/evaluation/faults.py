"""What goes wrong inside an evaluation on one rank: where, and with what, put in place by patching this process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from longspan.comm.control_group import ControlGroup
from longspan.evaluation import evaluate as portions
from longspan.evaluation.metrics import EvaluationOptions
from longspan.model.seams import attention_calls
from longspan.train.plans import PlanChoice

KINDS: dict[str, type[BaseException]] = {"error": ValueError, "Ctrl-C": KeyboardInterrupt}
PLACES = (
    "planning",
    "agreement on the plan",
    "reading",
    "reading of a later portion",
    "question whether to stop",
    "forward pass",
    "forward pass of the last portion",
    "trial of the metric",
    "metric",
    "progress",
    "reduction",
)
ENDS = ("stop", "time limit")  # not errors: an evaluation that is to end, by what one rank sees
TOGETHER = {"reading", "reading of a later portion", "trial of the metric", "metric", *ENDS}  # told to all; they go on
EVERY = -1


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
        return "its time limit of 1e-09 s is over" if self.place == "time limit" else f"boom in {self.place}"


@dataclass
class Trap:
    """Raises the fault at its n-th call."""

    fault: Fault
    calls_before: int = 0
    calls: int = field(default=0, init=False)

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls > self.calls_before and self.fault.place not in ENDS:
            raise KINDS[self.fault.kind](self.fault.text)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the trap before it."""

        def trapped(*args: Any, **keywords: Any) -> Any:
            self()
            return function(*args, **keywords)

        return trapped

    def why(self) -> str:
        """Why to stop; nothing at the first call."""
        self()
        return self.fault.text if self.fault.place == "stop" and self.calls > 1 else ""


class Documents:
    """Documents whose reading may fail."""

    def __init__(self, documents: Sequence[np.ndarray], trap: Trap | None) -> None:
        self.lengths = tuple(map(len, documents))
        self._documents, self._trap = documents, trap

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> "Document":
        return Document(self._documents[document], self._trap)


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
) -> Iterator[tuple[Documents, EvaluationOptions]]:
    """Documents and options of an evaluation in portions of two micro-batches, which goes wrong on the fault's rank."""
    place = fault.place if fault is not None and fault.rank in (rank, EVERY) else ""
    later = {"reading of a later portion": 5, "forward pass of the last portion": 5, "question whether to stop": 1}
    later["metric"] = 1
    trap = Trap(fault, later.get(place, 0)) if fault is not None and place else None
    patches: dict[str, tuple[Any, str]] = {
        "planning": (PlanChoice, "plan"),
        "agreement on the plan": (ControlGroup, "agree_on_flags"),
        "forward pass": (attention_calls, "attend"),
        "forward pass of the last portion": (attention_calls, "attend"),
        "reduction": (ControlGroup, "sum_of_arrays"),
    }
    options = EvaluationOptions(
        step=77,
        metrics={"largest": trap.before(largest) if trap and place.endswith("metric") else largest},
        seconds=1e-9 if place == "time limit" else None,
        stopped=trap.why if trap and place in ("question whether to stop", "stop") else lambda: "",
        progress=trap if trap and place == "progress" else None,
    )
    read = Documents(documents, trap if place.startswith("reading") else None)
    with mock.patch.object(portions, "PORTION", 2):
        if trap is None or place not in patches:
            yield read, options
            return
        owner, name = patches[place]
        with mock.patch.object(owner, name, trap.before(getattr(owner, name))):
            yield read, options


def largest(rows: Any) -> tuple[Tensor, int]:
    """A metric: the sum of the largest logits."""
    return rows.logits.amax(-1).double().sum(), len(rows.targets)

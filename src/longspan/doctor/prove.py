"""`prove`: whether longspan runs a model exactly here: cases over ranks, each compared with the stock model.

>>> outcomes = prove(shrunken(config), cases_named("basic", ranks=3), ranks=3)
>>> [outcome.status for outcome in outcomes]
['exact', 'exact', 'exact', 'exact', 'exact']

No error of a model leaves `prove`: it becomes the outcome of a case. Cases of one home share a world; a case that ends
its ranks is followed by a new world for the cases that are left.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from longspan.comm import run_local
from longspan.doctor.cases import LENGTHS, Case
from longspan.doctor.expected import Stock, error_text
from longspan.doctor.images import image_documents
from longspan.doctor.outcomes import Outcome, Proof, WorldFacts
from longspan.doctor.ranks import Expected, Task, preparation, run_cases
from longspan.doctor.stock import (
    documents_for,
)
from longspan.errors import CommError, LongspanError
from longspan.layout import Layout
from longspan.model.exactness.trial_documents import TrialDocument
from longspan.model.seams.refusals import DOCTOR

SECONDS_PER_CASE = 20.0

InWorld = tuple[WorldFacts, dict[int, Outcome]]
Launch = Callable[[Callable[[int, Task], InWorld], Task, int, float], InWorld]


@dataclass(frozen=True)
class Ranks:
    """What a proof runs on: so many processes, and how they are started.

    `timeout` is how long a rank waits for the others. `launch` runs a function on every rank and returns the first
    one's result; None: on local processes, which are started again where a case ends them.
    """

    count: int
    backend: str = "gloo"
    timeout: float = 30.0
    show: bool = False
    launch: Launch | None = None


def prove(config: PreTrainedConfig, cases: Sequence[Case], ranks: int, *, backend: str = "gloo") -> tuple[Outcome, ...]:
    """The outcome of every case for a model of this configuration with random weights, over local processes.

    The model is made as the configuration says: give a small one (`shrunken`). Raises nothing of the model's.
    """
    return run_proof(config, cases, Ranks(ranks, backend)).outcomes


def run_proof(config: PreTrainedConfig, cases: Sequence[Case], ranks: Ranks) -> Proof:
    """The same on these ranks, with what they say of their worlds."""
    outcomes: dict[int, Outcome] = {}
    worlds: list[WorldFacts] = []
    try:
        documents = documents_for(config, LENGTHS)
    except Exception as error:
        return Proof(tuple(Outcome(case, "not built", message=error_text(error)) for case in cases))
    images, refusal = _images(config, cases)
    expected = Stock(config, documents, images).expected(cases)
    for number, case in enumerate(cases):
        if case.encoder and refusal is not None:
            outcomes[number] = replace(refusal, case=case)
        elif isinstance(failure := expected[case.dtype, False, case.encoder > 0], str):
            outcomes[number] = Outcome(case, "not built", message=failure)
        elif case.router_losses and isinstance(failure := expected[case.answer], str):
            outcomes[number] = Outcome(case, "refused", message=failure)
    answers = {key: answer for key, answer in expected.items() if isinstance(answer, Expected)}
    for home, numbered in _by_home(cases, ranks.count, outcomes).items():
        task = Task(config, home, tuple(numbered), answers, documents, ranks.backend, ranks.timeout, images=images)
        task = replace(task, show=ranks.show, architecture=MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))
        outcomes |= _run_home(task, ranks, worlds)
    return Proof(tuple(outcomes[number] for number in range(len(cases))), tuple(worlds))


def _images(config: PreTrainedConfig, cases: Sequence[Case]) -> tuple[tuple[TrialDocument, ...], Outcome | None]:
    """The documents with images where cases want them, or why there are none."""
    first = next((case for case in cases if case.encoder), None)
    if first is None:
        return (), None
    try:
        return image_documents(config), None
    except LongspanError as error:
        return (), Outcome(first, "refused", message=str(error).partition(DOCTOR)[0])
    except Exception as error:
        return (), Outcome(first, "not built", message=error_text(error))


def _by_home(cases: Sequence[Case], ranks: int, outcomes: dict[int, Outcome]) -> dict[Layout, list[tuple[int, Case]]]:
    """The cases that have no outcome yet by their home, those of one preparation together; adds the refused ones."""
    homes: dict[Layout, list[tuple[int, Case]]] = {}
    for number, case in enumerate(cases):
        if number in outcomes:
            continue
        try:
            homes.setdefault(case.home(ranks), []).append((number, case))
        except LongspanError as error:
            outcomes[number] = Outcome(case, "refused", message=str(error))
    for numbered in homes.values():
        first = {preparation(case): number for number, case in reversed(numbered)}
        numbered.sort(key=lambda pair: (first[preparation(pair[1])], pair[0]))
    return homes


def _run_home(task: Task, ranks: Ranks, worlds: list[WorldFacts]) -> dict[int, Outcome]:
    """The outcomes of a home's cases, in as many worlds as it takes."""
    outcomes: dict[int, Outcome] = {}
    left = list(task.cases)
    with tempfile.TemporaryDirectory(prefix="longspan-proof-") as folder:
        while left:
            record = Path(folder) / f"{len(left)}.jsonl"
            done, failure = _run_world(replace(task, cases=tuple(left), record=str(record)), ranks, worlds)
            outcomes |= done
            left = [(number, case) for number, case in left if number not in outcomes]
            if left and failure is not None:
                number, case = left.pop(0)
                outcomes[number] = _of_failure(case, failure)
            if ranks.launch is not None:  # not ours to start again
                after = "ranks had ended in the case before"
                outcomes |= {number: Outcome(case, "crashed", message=after) for number, case in left}
                break
    return outcomes


def _run_world(task: Task, ranks: Ranks, worlds: list[WorldFacts]) -> tuple[dict[int, Outcome], BaseException | None]:
    """The outcomes in one world, and the error that ended it before the last case."""
    count, seconds = len(task.home.ranks), ranks.timeout + SECONDS_PER_CASE * len(task.cases)
    launch = ranks.launch or _start
    try:
        world, outcomes = launch(run_cases, task, count, seconds)
    except Exception as error:
        return _recorded(task), error
    worlds.append(world)
    return outcomes, None


def _start(fn: Callable[[int, Task], InWorld], task: Task, count: int, seconds: float) -> InWorld:
    return run_local(fn, count, (task,), timeout=seconds, grace=5.0)[0]


def _recorded(task: Task) -> dict[int, Outcome]:
    """The outcomes before the error that ended the ranks."""
    record = Path(task.record)
    cases, outcomes = dict(task.cases), dict[int, Outcome]()
    for line in record.read_text().splitlines() if record.exists() else []:
        fields: dict[str, Any] = json.loads(line)
        number = fields.pop("number")
        fields |= {name: tuple(fields[name]) for name in ("levels", "why")}
        outcomes[number] = Outcome(cases[number], **fields)
    return outcomes


def _of_failure(case: Case, error: BaseException) -> Outcome:
    refused = isinstance(error, LongspanError) and not isinstance(error, CommError)
    return Outcome(case, "refused" if refused else "crashed", message=error_text(error))

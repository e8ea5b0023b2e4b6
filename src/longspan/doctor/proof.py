"""`prove`: whether longspan runs a model exactly here: cases over ranks, each compared with the stock model.

>>> outcomes = prove(shrink_configuration(config), list_cases("basic", ranks=3), ranks=3)
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
from longspan.doctor.expected import Expected, Stock
from longspan.doctor.images import make_image_documents
from longspan.doctor.outcomes import Outcome, Proof, WorldFacts, error_text
from longspan.doctor.ranks import Task, preparation_key, run_cases
from longspan.doctor.stock import draw_documents
from longspan.errors import CommError, LongspanError
from longspan.layout import Layout
from longspan.model.exactness.trial_documents import TrialDocument
from longspan.model.seams.refusals import DOCTOR

SECONDS_PER_CASE = 20.0

InWorld = tuple[WorldFacts, dict[int, Outcome]]
Launch = Callable[[Callable[[int, Task], InWorld], Task, int, float], InWorld]


@dataclass(frozen=True)
class Ranks:
    """What a proof runs on: `count` processes, and how they are started.

    `timeout` is how long a rank waits for the others, in seconds; with `show` the first rank prints each outcome.
    `launch` runs a function on every rank and returns the first one's result; None: on local processes, which are
    started again where a case ends them.
    """

    count: int
    backend: str = "gloo"
    timeout: float = 30.0
    show: bool = False
    launch: Launch | None = None


def prove(config: PreTrainedConfig, cases: Sequence[Case], ranks: int, *, backend: str = "gloo") -> tuple[Outcome, ...]:
    """Prove every case for a model of this configuration with random weights, over local processes.

    The model is made from the configuration: give a small one (`shrink_configuration`). An error of the model's code is
    not raised: it is the outcome of its case.
    """
    return run_proof(config, cases, Ranks(ranks, backend)).outcomes


def run_proof(config: PreTrainedConfig, cases: Sequence[Case], ranks: Ranks) -> Proof:
    """Run every case on these ranks; returns their outcomes, in the order of cases, with the facts of their worlds.

    First the stock model computes what each case should give, in one process. A case whose documents or images cannot
    be made, or whose stock model fails, gets its outcome from that. All other cases run grouped by home, as ranks start
    once for each home.
    """
    outcomes: dict[int, Outcome] = {}
    worlds: list[WorldFacts] = []
    try:
        documents = draw_documents(config, LENGTHS)
    except Exception as error:
        return Proof(tuple(Outcome(case, "not built", message=error_text(error)) for case in cases))
    image_documents, refusal = _draw_image_documents(config, cases)
    expected = Stock(config, documents, image_documents).compute_answers(cases)
    for number, case in enumerate(cases):
        if case.encoder and refusal is not None:
            outcomes[number] = replace(refusal, case=case)
        elif isinstance(failure := expected[case.dtype, False, case.encoder > 0], str):
            outcomes[number] = Outcome(case, "not built", message=failure)
        elif case.router_losses and isinstance(failure := expected[case.answer], str):
            # The stock model runs, as the branch before shows: only losses of its routers cannot be computed.
            outcomes[number] = Outcome(case, "refused", message=failure)
    answers = {key: answer for key, answer in expected.items() if isinstance(answer, Expected)}
    for home, numbered in _group_cases(cases, ranks.count, outcomes).items():
        task = Task(config, home, tuple(numbered), answers, documents, ranks.backend, ranks.timeout, show=ranks.show)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        task = replace(task, architecture=architecture, image_documents=image_documents)
        outcomes |= _run_home_cases(task, ranks, worlds)
    return Proof(tuple(outcomes[number] for number in range(len(cases))), tuple(worlds))


def _draw_image_documents(
    config: PreTrainedConfig, cases: Sequence[Case]
) -> tuple[tuple[TrialDocument, ...], Outcome | None]:
    """Draw the documents with images, none if no case has an encoder; or make the outcome of all cases that have one.

    A refusal's message is cut at DOCTOR, where its advice to run this command begins.
    """
    first = next((case for case in cases if case.encoder), None)
    if first is None:
        return (), None
    try:
        return make_image_documents(config), None
    except LongspanError as error:
        return (), Outcome(first, "refused", message=str(error).partition(DOCTOR)[0])
    except Exception as error:
        return (), Outcome(first, "not built", message=error_text(error))


def _group_cases(
    cases: Sequence[Case], ranks: int, outcomes: dict[int, Outcome]
) -> dict[Layout, list[tuple[int, Case]]]:
    """Group the cases that have no outcome yet by their home, with their numbers.

    Cases that share a prepared model follow each other, in the place of the first of them. A case whose home the ranks
    cannot have is added to `outcomes` as refused.
    """
    cases_of_homes: dict[Layout, list[tuple[int, Case]]] = {}
    for number, case in enumerate(cases):
        if number in outcomes:
            continue
        try:
            cases_of_homes.setdefault(case.home(ranks), []).append((number, case))
        except LongspanError as error:
            outcomes[number] = Outcome(case, "refused", message=str(error))
    for numbered in cases_of_homes.values():
        first_numbers = {preparation_key(case): number for number, case in reversed(numbered)}
        numbered.sort(key=lambda pair: (first_numbers[preparation_key(pair[1])], pair[0]))
    return cases_of_homes


def _run_home_cases(task: Task, ranks: Ranks, worlds: list[WorldFacts]) -> dict[int, Outcome]:
    """Run a home's cases, in as many worlds as it takes; returns their outcomes.

    The error that ended a world is the outcome of its first case without one; the next world takes those after it.
    """
    outcomes: dict[int, Outcome] = {}
    pending = list(task.cases)
    with tempfile.TemporaryDirectory(prefix="longspan-proof-") as folder:
        while pending:
            record = Path(folder) / f"{len(pending)}.jsonl"
            new_outcomes, failure = _run_world(replace(task, cases=tuple(pending), record=str(record)), ranks, worlds)
            outcomes |= new_outcomes
            pending = [(number, case) for number, case in pending if number not in outcomes]
            if pending and failure is not None:
                number, case = pending.pop(0)
                outcomes[number] = _failure_outcome(case, failure)
            if ranks.launch is not None:  # torchrun's processes: nothing here can start them again
                reason = "ranks had ended in the case before"
                outcomes |= {number: Outcome(case, "crashed", message=reason) for number, case in pending}
                break
    return outcomes


def _run_world(task: Task, ranks: Ranks, worlds: list[WorldFacts]) -> tuple[dict[int, Outcome], BaseException | None]:
    """Run cases in one world; returns their outcomes, and the error that ended the world early, or None."""
    count, seconds = len(task.home.ranks), ranks.timeout + SECONDS_PER_CASE * len(task.cases)
    launch = ranks.launch or _start_world
    try:
        world, outcomes = launch(run_cases, task, count, seconds)
    except Exception as error:
        return _read_outcomes(task), error
    worlds.append(world)
    return outcomes, None


def _start_world(fn: Callable[[int, Task], InWorld], task: Task, count: int, seconds: float) -> InWorld:
    """Run a function on `count` local processes, for at most `seconds`; returns the result of rank 0."""
    return run_local(fn, count, (task,), timeout=seconds, grace=5.0)[0]


def _read_outcomes(task: Task) -> dict[int, Outcome]:
    """Read the outcomes that the first rank recorded before an error ended the ranks."""
    record = Path(task.record)
    cases, outcomes = dict(task.cases), dict[int, Outcome]()
    for line in record.read_text().splitlines() if record.exists() else []:
        fields: dict[str, Any] = json.loads(line)
        number = fields.pop("number")
        fields |= {name: tuple(fields[name]) for name in ("levels", "why")}  # JSON has lists only
        outcomes[number] = Outcome(cases[number], **fields)
    return outcomes


def _failure_outcome(case: Case, error: BaseException) -> Outcome:
    """Return the outcome of a case whose error ended its ranks: refused by an error of this package, else crashed.

    A CommError is a crash too: it means that ranks lost each other, as when one of them died.
    """
    refused = isinstance(error, LongspanError) and not isinstance(error, CommError)
    return Outcome(case, "refused" if refused else "crashed", message=error_text(error))

"""`prove`: whether longspan runs a model exactly here: cases over ranks, each compared with the stock model.

No error of a model leaves `prove`: it becomes the outcome of a case. Cases of one home share a world; where one ends
its ranks, each has a world of its own.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, get_args

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from longspan.comm import World, run_local
from longspan.doctor.cases import LENGTHS, Case, plan_case
from longspan.doctor.documents import draw_documents, make_image_documents, make_item_documents
from longspan.doctor.outcomes import Outcome, Status, exception_text, outcome_text
from longspan.doctor.stock import (
    NO_ROUTER,
    ROUTER,
    ExpectedAnswer,
    ModelAnswer,
    collect_gradients,
    compute_expected_answers,
    compute_in_float64,
    config_with_every_expert,
    errors_of_missing_gradients,
    gradient_errors,
    loss_error,
)
from longspan.doctor.which_model import register_class
from longspan.errors import CommError, LongspanError, ModelError, plural
from longspan.evaluation.live import evaluate
from longspan.layout import Layout
from longspan.model import EncoderHome, prepare
from longspan.model.exactness.image_documents import TrialDocument
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.experts.router import make_router_statistics
from longspan.model.layers import towers_beside_text_model
from longspan.model.multimodal.multimodal_model import map_stock_names
from longspan.model.multimodal.prepare_encoder import encoder_blocks
from longspan.model.prepared import PrepareOptions
from longspan.model.seams.doctor_hint import DOCTOR
from longspan.plain_text import text_table
from longspan.plan import Form, Plan
from longspan.train import run_step
from longspan.train.step_inputs import check_step_arguments

SECONDS_PER_CASE = 20.0


@dataclass(frozen=True)
class WorldFacts:
    """A world in which cases ran: its ranks and device, and the process groups that were made."""

    ranks: int
    device: str
    backend: str
    groups: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Proof:
    """Outcomes in the order of their cases, and the worlds in which they ran; `text_suffices`: the model's class is
    also that of text, so that refused images are only a remark.
    """

    outcomes: tuple[Outcome, ...]
    worlds: tuple[WorldFacts, ...] = ()
    text_suffices: bool = False

    @property
    def good(self) -> bool:
        """Whether there are cases and every one is good; refused images do not count where texts alone suffice."""

        def is_remark(outcome: Outcome) -> bool:
            return self.text_suffices and outcome.case.encoder > 0 and outcome.status == "refused"

        return bool(self.outcomes) and all(outcome.good or is_remark(outcome) for outcome in self.outcomes)


def proof_text(proof: Proof, heading: Sequence[str], seconds: float) -> str:
    """Return what is printed of a proof: lines of `heading`, a row for each case, and the verdict."""
    # a dot: a case that says nothing against the model
    marks = ["✓" if outcome.status == "exact" else "·" if outcome.good else "✗" for outcome in proof.outcomes]
    rows = list[tuple[str, ...]]()
    first_cases = dict[str, str]()  # names of cases by text: further cases with the same message refer to the first
    for mark, outcome in zip(marks, proof.outcomes, strict=True):
        name = outcome.case.name
        text = outcome_text(outcome)
        if (first := first_cases.setdefault(text, name)) != name and outcome.loss_error is None:
            text = f"as {first}"
        rows.append((mark, name, outcome.status, text))
    table = text_table(("", "case", "result", "found"), rows, left=4)
    numbers = {status: sum(o.status == status for o in proof.outcomes) for status in get_args(Status)}
    parts = [f"{number} {status}" for status, number in numbers.items() if number]
    word = "proven" if proof.good else "NOT proven"
    count = plural(len(proof.outcomes), "case")
    verdict = f"{word} on this machine: of {count} {', '.join(parts)} ({seconds:.0f} s)"
    return "\n".join([*heading, "", table, "", verdict])


def proof_json(proof: Proof, model: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the record of a proof; `model` is what it says of the small copies."""
    worlds = [{"ranks": w.ranks, "device": w.device, "backend": w.backend} for w in proof.worlds]
    rows = [outcome.row() for outcome in proof.outcomes]
    return {"good": proof.good, "seconds": seconds, "model": model, "cases": rows, "worlds": worlds}


@dataclass(frozen=True)
class Task:
    """Cases of one home, each with its number among all, and what the stock model answers to them."""

    config: PreTrainedConfig
    home: Layout
    cases: tuple[tuple[int, Case], ...]
    # The key is the dtype, whether there are losses of routers, and whether there are images.
    expected: dict[tuple[str, bool, bool], ExpectedAnswer]
    documents: list[np.ndarray]
    backend: str
    timeout: float
    # One of this many cases is printed; 0 prints none.
    show: int = 0
    # A configuration without a class in transformers has this class.
    architecture: type | None = None
    # Cases with an encoder have these documents.
    image_documents: tuple[TrialDocument, ...] = ()
    # Under an adapter weights are stored as this form says; None: there is no adapter.
    form: Form | None = None


def run_cases_on_rank(rank: int, task: Task) -> tuple[WorldFacts, dict[int, Outcome]]:
    """Run every case in one world; returns the world's facts and the outcomes by number. The first error in a step is
    raised, and ends the world.
    """
    outcomes: dict[int, Outcome] = {}
    register_class(task.config, task.architecture)
    # else convolutions of towers would be rounded to TF32, and the stock model's answers are in float32
    torch.backends.cudnn.allow_tf32 = False
    with World(task.home, backend=task.backend, timeout=task.timeout) as world:
        for _, group in groupby(task.cases, key=lambda numbered: _preparation_key(numbered[1])):
            cases = list(group)
            run = CaseRun(task, world, cases[0][1])
            for number, case in cases:
                outcome = outcomes[number] = run.run_case(case)
                if world.rank == task.home.ranks[0] and task.show and number % task.show == 0:
                    text = f"{case.name}: {outcome.status} ({outcome.seconds:.1f} s)"
                    print(text, file=sys.stderr, flush=True)
        process_groups = tuple(asdict(record) for record in world.process_groups.made)
        return WorldFacts(len(task.home.ranks), str(world.device), world.backend, process_groups), outcomes


def _preparation_key(case: Case) -> tuple[str, str, bool, int]:
    return case.dtype, case.recompute, case.sequence_parallel, case.encoder


class CaseRun:
    """One prepared model, or why it was refused, and its cases one after another."""

    def __init__(self, task: Task, world: World, first: Case) -> None:
        self.task = task
        self.world = world
        self.refusal: str = ""
        self.model: nn.Module = nn.Module()
        self._began = time.perf_counter()
        expected = task.expected[first.dtype, False, first.encoder > 0]
        # float64 without casts to float32, as the stock model ran
        self.mode: Callable[[], AbstractContextManager[Any]] = (
            compute_in_float64 if expected.in_float64 else nullcontext
        )
        config = config_with_every_expert(task.config) if expected.every_expert else task.config
        self.documents: Any = (
            make_item_documents(task.config, task.image_documents) if first.encoder else task.documents
        )
        options = PrepareOptions(activation_checkpointing=first.recompute).with_form(
            replace(task.form or Form(), sequence_parallel=first.sequence_parallel)
        )
        encoder: Any = None
        try:
            with self.mode():
                model: Any = make_tiny_model(config, getattr(torch, first.dtype), images=first.encoder > 0)
                if task.form:
                    from longspan.doctor.frozen import add_drawn_adapter

                    model = add_drawn_adapter(model)
                if first.encoder:
                    has_blocks = any(encoder_blocks(tower) for tower in towers_beside_text_model(model))
                    encoder = EncoderHome(
                        home=Layout(len(task.home.ranks), tp=first.encoder),
                        recompute=first.recompute != "none",
                        activation_checkpointing=first.recompute if has_blocks else "none",
                    )
                self.model = prepare(model, world, encoder=encoder, options=options)
        except CommError:
            raise
        except LongspanError as error:
            # The error advises to run this command, which is left out.
            self.refusal = str(error).partition(DOCTOR)[0]

    def run_case(self, case: Case) -> Outcome:
        """Run a case; all ranks call it together. What `prepare` or a check refuses becomes its outcome.

        An error of the step is raised: other ranks may wait in it. The first case's seconds include preparation.
        """
        # a refusal returns early, and the time of the next case then counts from here
        began = self._began
        self._began = time.perf_counter()
        expected = self.task.expected[case.answer_key]
        try:
            if self.refusal:
                raise ModelError(self.refusal)
            heads = getattr(self.task.config.get_text_config(), "num_attention_heads", None)
            packed = {"lengths": self.documents.lengths, "targets": self.documents.targets} if case.encoder else {}
            plan = plan_case(case, self.task.home, heads=heads, node_size=self.world.node_size, **packed)
            # The check tries rows, in this mode.
            with self.mode():
                check_step_arguments(self.model, plan, self.documents, self.world, backward=not case.evaluation)
            if case.router_losses:  # raises for a model whose routers have no losses
                make_router_statistics(self.model, self.world, plan.tokens, ROUTER)
        except LongspanError as error:  # the same on every rank: nothing was sent yet
            return Outcome(case, "refused", message=str(error), seconds=time.perf_counter() - began)
        with self.mode():
            loss, errors = self._step_errors(case, plan, expected.answer)
        parameter = max(errors, key=lambda name: errors[name], default="")
        gradient = errors.get(parameter)
        self._began = time.perf_counter()
        status_of_error: Status = "not judged" if expected.near_ties else "wrong"
        return Outcome(
            case,
            "exact" if max(loss, gradient or 0.0) <= expected.tolerance else status_of_error,
            loss,
            gradient,
            parameter,
            expected.tolerance,
            seconds=self._began - began,
        )

    def _step_errors(self, case: Case, plan: Plan, stock: ModelAnswer) -> tuple[float, dict[str, float]]:
        """The worst of all ranks. Gradients are compared under the stock model's names, on the rank that has them; one
        that is missing on all ranks is an error. The losses of routers count as losses of the case. An evaluation has
        only a loss."""
        if case.evaluation:
            return loss_error(evaluate(self.model, self.documents, plan, self.world).loss, stock.loss), {}
        router = ROUTER if case.router_losses else NO_ROUTER
        self.world.prepare(plan)
        result = run_step(self.model, plan, self.documents, self.world, router=router)
        gradients = collect_gradients(self.model)
        stock_names = map_stock_names(gradients)
        errors_here = gradient_errors({name: gradients[ours] for name, ours in stock_names.items()}, stock)
        self.model.zero_grad()
        errors = dict[str, float]()
        for rank_errors in self.world.control.gather_objects(errors_here, "errors of gradients"):
            errors |= {name: max(error, errors.get(name, 0.0)) for name, error in rank_errors.items()}
        errors |= errors_of_missing_gradients(set(errors), stock)
        losses = [loss_error(result.loss, stock.loss)]
        if case.router_losses and result.router is not None:
            losses += [loss_error(ours, theirs) for ours, theirs in zip(result.router, stock.routers, strict=True)]
        return max(losses), errors


WorldOutcomes = tuple[WorldFacts, dict[int, Outcome]]
Launch = Callable[[Callable[[int, Task], WorldOutcomes], Task, int, float], WorldOutcomes]


@dataclass(frozen=True)
class ProofRanks:
    """What a proof runs on: `count` processes; `timeout` is how long a rank waits for the others, in seconds; of `show`
    cases the first rank prints one outcome (0: none). `launch` runs a function on every rank and returns the first
    one's result; None: on local processes, which are started again for each case where one ends them.
    """

    count: int
    backend: str = "gloo"
    timeout: float = 30.0
    show: int = 0
    launch: Launch | None = None


def prove(
    config: PreTrainedConfig, cases: Sequence[Case], ranks: int, *, backend: str = "gloo"
) -> tuple[Outcome, ...]:
    """Prove every case for a model of this configuration with random weights, over local processes.

    >>> outcomes = prove(shrink_configuration(config), list_cases("basic", ranks=3), ranks=3)
    >>> [outcome.status for outcome in outcomes]
    ['exact', 'exact', 'exact', 'exact', 'exact']

    An error of the model's code is not raised: it is the outcome of its case.
    """
    return run_proof(config, cases, ProofRanks(ranks, backend)).outcomes


def run_proof(
    config: PreTrainedConfig, cases: Sequence[Case], ranks: ProofRanks, form: Form | None = None
) -> Proof:
    """Run every case on these ranks; returns their outcomes, in the order of cases, with the facts of their worlds.
    With a `form` the model has an adapter over weights in 4 bits.

    First the stock model computes what each case should give, in one process. A case whose documents or images cannot
    be made, or whose stock model fails, gets its outcome from that, and one whose home the ranks cannot have is
    refused. All other cases run grouped by home, as ranks start once for each home.
    """
    outcomes: dict[int, Outcome] = {}
    worlds: list[WorldFacts] = []
    try:
        documents = draw_documents(config, LENGTHS)
    except Exception as error:
        return Proof(tuple(Outcome(case, "not built", message=exception_text(error)) for case in cases))
    image_documents: tuple[TrialDocument, ...] = ()
    image_failure: tuple[Status, str] | None = None
    try:
        image_documents = make_image_documents(config) if any(case.encoder for case in cases) else ()
    except LongspanError as error:
        image_failure = "refused", str(error).partition(DOCTOR)[0]
    except Exception as error:
        image_failure = "not built", exception_text(error)
    expected = compute_expected_answers(config, cases, documents, image_documents, form)
    cases_of_homes: dict[Layout, list[tuple[int, Case]]] = {}
    for number, case in enumerate(cases):
        outcome = _outcome_without_run(case, expected, image_failure)
        if outcome is not None:
            outcomes[number] = outcome
            continue
        try:
            cases_of_homes.setdefault(case.home(ranks.count), []).append((number, case))
        except LongspanError as error:
            outcomes[number] = Outcome(case, "refused", message=str(error))
    answers = {key: answer for key, answer in expected.items() if isinstance(answer, ExpectedAnswer)}
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for home, numbered in cases_of_homes.items():
        # cases that share a prepared model follow each other, where the first of them would stand
        first_numbers = {_preparation_key(case): number for number, case in reversed(numbered)}
        numbered.sort(key=lambda pair: (first_numbers[_preparation_key(pair[1])], pair[0]))
        task = Task(
            config,
            home,
            tuple(numbered),
            answers,
            documents,
            ranks.backend,
            ranks.timeout,
            ranks.show,
            architecture,
            image_documents,
            form,
        )
        outcomes |= _run_home_cases(task, ranks, worlds)
    return Proof(tuple(outcomes[number] for number in range(len(cases))), tuple(worlds))


def _outcome_without_run(
    case: Case,
    expected: Mapping[tuple[str, bool, bool], ExpectedAnswer | str],
    image_failure: tuple[Status, str] | None,
) -> Outcome | None:
    """None: the case is to be run."""
    if case.encoder and image_failure is not None:
        status, message = image_failure
        return Outcome(case, status, message=message)
    plain_answer = expected[case.dtype, False, case.encoder > 0]
    if isinstance(plain_answer, str):
        return Outcome(case, "not built", message=plain_answer)
    answer = expected[case.answer_key]
    if isinstance(answer, str):  # the stock model runs, and only losses of its routers cannot be computed
        return Outcome(case, "refused", message=answer)
    return None


def _run_home_cases(task: Task, ranks: ProofRanks, worlds: list[WorldFacts]) -> dict[int, Outcome]:
    """Where an error ends the world, each of several cases runs in a world of its own, and then has its own error."""
    count = len(task.home.ranks)
    seconds = ranks.timeout + SECONDS_PER_CASE * len(task.cases)
    try:
        if ranks.launch is not None:
            world, outcomes = ranks.launch(run_cases_on_rank, task, count, seconds)
        else:
            world, outcomes = run_local(run_cases_on_rank, count, (task,), timeout=seconds, grace=5.0)[0]
    except Exception as error:
        if len(task.cases) > 1 and ranks.launch is None:  # nothing here can start torchrun's processes again
            alone = [replace(task, cases=(numbered,)) for numbered in task.cases]
            return {n: outcome for part in alone for n, outcome in _run_home_cases(part, ranks, worlds).items()}
        # a CommError is of ranks that lost each other, as when one of them died
        refused = isinstance(error, LongspanError) and not isinstance(error, CommError)
        status: Status = "refused" if refused else "crashed"
        return {number: Outcome(case, status, message=exception_text(error)) for number, case in task.cases}
    worlds.append(world)
    return outcomes

"""What each rank does in a proof: one world of a home, in it every case of that home, compared with the stock model.

An outcome is written to a file as soon as it is known, so that none is lost where a later case ends the ranks.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.doctor.cases import TEXTS, Case, PackedDocuments, plan_case
from longspan.doctor.expected import Expected
from longspan.doctor.images import item_documents
from longspan.doctor.outcomes import Outcome, WorldFacts
from longspan.doctor.stock import (
    NO_ROUTER,
    ROUTER,
    Answer,
    choose_every_expert,
    collect_gradients,
    gradient_errors,
    loss_error,
    missing_errors,
    precision_mode,
)
from longspan.doctor.which_model import register_class
from longspan.errors import CommError, LongspanError, ModelError
from longspan.evaluation.evaluate import evaluate
from longspan.layout import Layout
from longspan.model import EncoderHome, prepare
from longspan.model.exactness.small_copies import make_tiny_model
from longspan.model.exactness.trial_documents import TrialDocument
from longspan.model.execution import model_execution
from longspan.model.experts.moe import router_statistics
from longspan.model.prepare_model import PrepareOptions
from longspan.model.seams.refusals import DOCTOR
from longspan.model.vision.join import map_stock_names
from longspan.plan import Plan
from longspan.plan.hierarchy import Levels, group_levels, hierarchical_groups
from longspan.train import run_step
from longspan.train.step_check import check_step


@dataclass(frozen=True)
class Task:
    """Cases of one home, each with its number among all, and what the stock model answers to them."""

    config: PreTrainedConfig
    home: Layout
    cases: tuple[tuple[int, Case], ...]
    expected: dict[tuple[str, bool, bool], Expected]  # by dtype, losses of routers or not, images or not
    documents: list[np.ndarray]
    backend: str
    timeout: float
    record: str = ""  # a file, to which the first rank adds a line for each outcome
    show: bool = False
    architecture: type | None = None  # of a configuration without a class in transformers
    image_documents: tuple[TrialDocument, ...] = ()  # of the cases with an encoder


def run_cases(rank: int, task: Task) -> tuple[WorldFacts, dict[int, Outcome]]:
    """Run every case in one world; returns the world's facts and the outcomes by number, which are recorded at once.

    The first error in a step is raised, and ends the world.
    """
    outcomes: dict[int, Outcome] = {}
    register_class(task.config, task.architecture)
    torch.backends.cudnn.allow_tf32 = False  # of the convolutions of towers; the stock model's answers are in float32
    with World(task.home, backend=task.backend, timeout=task.timeout) as world:
        for _, group in groupby(task.cases, key=lambda numbered: preparation_key(numbered[1])):
            cases = list(group)
            run = CaseRun(task, world, cases[0][1])
            for number, case in cases:
                outcomes[number] = run.run_case(case)
                _record_outcome(task, world, number, outcomes[number])
        process_groups = tuple(asdict(record) for record in world.process_groups.made)
        return WorldFacts(len(task.home.ranks), str(world.device), world.backend, process_groups), outcomes


def preparation_key(case: Case) -> tuple[str, str, bool, int]:
    """Return what cases of one home must have in common to share a prepared model."""
    return case.dtype, case.recompute, case.sequence_parallel, case.encoder


def _record_outcome(task: Task, world: World, number: int, outcome: Outcome) -> None:
    """On the first rank append an outcome to the record file, if there is one, and print it with `show`."""
    if world.rank != task.home.ranks[0]:
        return
    if task.record:
        with open(task.record, "a", encoding="utf-8") as file:  # noqa: PTH123
            fields = asdict(outcome)
            del fields["case"]  # its number stands for it
            file.write(json.dumps({"number": number, **fields}) + "\n")
    if task.show:
        print(f"{outcome.case.name}: {outcome.status} ({outcome.seconds:.1f} s)", file=sys.stderr, flush=True)


class CaseRun:
    """One prepared model, or why it was refused, and its cases one after another."""

    def __init__(self, task: Task, world: World, first: Case) -> None:
        """Prepare a model for the first of some cases that share it: they have one `preparation_key`.

        A refusal becomes the outcome of each case; an error of communication is raised and ends the world.
        """
        self.task: Task = task
        self.world: World = world
        self.dtype: Any = getattr(torch, first.dtype)
        self.refusal, self.model = "", nn.Module()
        has_images = first.encoder > 0
        expected = task.expected[first.dtype, False, has_images]
        self.whole: bool = expected.whole  # float64 without casts to float32, as the stock model ran
        self.config: PreTrainedConfig = choose_every_expert(task.config) if expected.every_expert else task.config
        self.documents: Any = item_documents(task.config, task.image_documents) if has_images else task.documents
        self._began = time.perf_counter()
        try:
            with precision_mode(self.dtype, whole=self.whole):
                self.model: nn.Module = self._prepare_model(first)
        except LongspanError as error:
            if isinstance(error, CommError):
                raise
            self.refusal: str = str(error).partition(DOCTOR)[0]  # without its advice to run this command

    def _prepare_model(self, first: Case) -> nn.Module:
        """Make a small model and prepare it for a case: its recomputation, sequence parallelism and encoder."""
        options = PrepareOptions(activation_checkpointing=first.recompute, sequence_parallel=first.sequence_parallel)
        model = make_tiny_model(self.config, self.dtype, images=first.encoder > 0)
        if not first.encoder:
            return prepare(model, self.world, options=options)
        home = Layout(len(self.task.home.ranks), tp=first.encoder)
        settings = EncoderHome(home=home, recompute=first.recompute != "none", activation_checkpointing=first.recompute)
        return prepare(model, self.world, encoder=settings, options=options)

    def run_case(self, case: Case) -> Outcome:
        """Run one case and return its outcome; an error of the step is raised, as other ranks may wait in it.

        The first case's seconds contain the preparation of the model.
        """
        began, self._began = self._began, time.perf_counter()  # the next case begins here if this one is refused
        expected = self.task.expected[case.answer]
        try:
            if self.refusal:
                raise ModelError(self.refusal)
            plan = self._plan_case(case)
        except LongspanError as error:  # the same on every rank: nothing was sent yet
            return Outcome(case, "refused", message=str(error), seconds=time.perf_counter() - began)
        with precision_mode(self.dtype, whole=self.whole):
            loss, errors = self._step_errors(case, plan, expected.answer)
        parameter = max(errors, key=lambda name: errors[name], default="")
        gradient = errors.get(parameter)
        self._began = time.perf_counter()
        return Outcome(
            case,
            "exact" if max(loss, gradient or 0.0) <= expected.tolerance else "wrong",
            loss,
            gradient,
            parameter,
            expected.tolerance,
            seconds=self._began - began,
            levels=tuple(str(_rank_levels(group_levels(group), self.world)) for group in hierarchical_groups(plan)),
            why=self._choice_reason(case, plan),
        )

    def _plan_case(self, case: Case) -> Plan:
        """Plan a case. Raises what its step would, on every rank, before it communicates."""
        heads = getattr(self.task.config.get_text_config(), "num_attention_heads", None)
        packed = PackedDocuments(self.documents.lengths, self.documents.targets) if case.encoder else TEXTS
        plan = plan_case(case, self.task.home, documents=packed, heads=heads, node_size=self.world.node_size)
        check_step(self.model, plan, self.documents, self.world, backward=not case.evaluation)
        if case.router_losses:  # raises for a model whose routers have no losses
            router_statistics(self.model, self.world, plan.tokens, ROUTER)
        return plan

    def _step_errors(self, case: Case, plan: Plan, stock: Answer) -> tuple[float, dict[str, float]]:
        """Return errors of the loss and of each gradient, the worst of all ranks.

        Gradients are compared under the stock model's names, on the rank that has them; one that is missing on all
        ranks is an error. The losses of routers count as losses of the case. An evaluation has only a loss.
        """
        if case.evaluation:
            loss = evaluate(self.model, self.documents, plan, self.world).loss
            return loss_error(loss, stock.loss), {}
        router = ROUTER if case.router_losses else NO_ROUTER
        self.world.prepare(plan)
        result = run_step(self.model, plan, self.documents, self.world, router=router)
        gradients = collect_gradients(self.model)
        errors_here = gradient_errors(
            {original: gradients[name] for original, name in map_stock_names(gradients).items()}, stock
        )
        self.model.zero_grad()
        rank_errors = self.world.control.gather_objects(errors_here, "errors of gradients")
        errors = {
            name: max(errors_of_rank.get(name, 0.0) for errors_of_rank in rank_errors)
            for name in {n for errors_of_rank in rank_errors for n in errors_of_rank}
        }
        errors |= missing_errors(set(errors), stock)
        losses = [loss_error(result.loss, stock.loss)]
        if case.router_losses and result.router is not None:
            losses += [loss_error(a, b) for a, b in zip(result.router, stock.routers, strict=True)]
        return max(losses), errors

    def _choice_reason(self, case: Case, plan: Plan) -> tuple[str, ...]:
        """Return why `auto` chose its type for the first group of the plan; empty for another type.

        It is empty too for a model whose calls of attention were not recorded, by which types are priced.
        """
        calls = model_execution(self.model).calls
        if case.cp_comm_type != "auto" or not calls:
            return ()
        config = self.task.config.get_text_config()
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        # recorded calls are of one head; types are priced for all heads of the model
        call = replace(calls[0], heads=heads, kv_heads=kv_heads)
        group, machine = plan.micro_batches[0].groups[0], self.world.machine
        return machine.explain_type(group, call.sizes, node_size=self.world.node_size)


def _rank_levels(levels: Levels, world: World) -> Levels:
    """Return levels of slots as levels of ranks: those with this rank's pipeline stage and tensor-parallel position."""
    a2a, p2p = (tuple(tuple(world.plane[s] for s in slots) for slots in level) for level in (levels.a2a, levels.p2p))
    return Levels(a2a, p2p)

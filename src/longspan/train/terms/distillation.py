"""A loss of whole distributions: a student's from those of a teacher, which runs over the same rows of the same plan.

The teacher's pass of a micro-batch comes first: what is left of it are the last hidden states of rows with a target,
and the teacher's head, which meets the student's chunk by chunk.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm import World, raise_first_error, to_device
from longspan.errors import DataError, LossError
from longspan.model.fsdp_params import reshard
from longspan.model.kinds import score_columns
from longspan.model.layers import architecture_name, mtp_depths, preserve_modes
from longspan.model.marks import is_multimodal, is_pipeline
from longspan.model.seams.call_rules import is_prepared
from longspan.model.seams.row_loss import OutputHead
from longspan.model.sharding import keep_parameters_whole
from longspan.plain_text import short_text
from longspan.plan import Plan
from longspan.train.divergence import Divergence, RowDivergences
from longspan.train.log_probs import target_log_probs_and_gradient
from longspan.train.loss import Head, Targets, chunked_loss, rows_of_two_heads
from longspan.train.passes import Passes, Term
from longspan.train.rows.read_rows import WEIGHTS, LocalBatch, target_rows
from longspan.train.step_inputs import StepInputs, check_step_arguments
from longspan.train.terms.agreed_loss import agree_on_loss
from longspan.train.terms.teacher_tables import TableComparison, TeacherTables

FIGURES = ("kl", "ce", "entropy", "teacher_mass")


@dataclass(frozen=True, eq=False)
class Distillation:
    """A loss of a student's distributions and those of a teacher, as `loss=` of `run_step`.

    >>> teacher = longspan.prepare(load_model("Qwen/Qwen3-32B").requires_grad_(False), world)
    >>> run_step(student, plan, documents, world, optimizer, loss=Distillation(teacher, beta=0.5))

    `teacher` is a prepared model of which nothing is trained, in the student's world, or the `TeacherTables` of tables
    that documents carry (`likeliest_tokens`). The step's loss is the sum over
    targets of weight · (D + cross_entropy_weight · cross entropy), divided by `divisor=` (None: the plan's targets).
    `beta`, `temperature`, `top_k` and `add_tail` choose the divergence D as TRL's `DistillationConfig` does (see
    docs/losses.md); the cross entropy is at temperature 1. `StepResult.figures` has `kl` and `ce`, divided as the loss
    is, and the means over targets of the student's `entropy` and of `teacher_mass`, the share of the teacher's
    distribution that is compared token by token.
    """

    teacher: nn.Module | TeacherTables
    beta: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    add_tail: bool = True
    cross_entropy_weight: float = 0.0

    def divergence(self) -> Divergence:
        """Return the divergence, checked. Raises LossError for values that there are not."""
        weight: Any = self.cross_entropy_weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise LossError(f"cross_entropy_weight is {short_text(weight)}; give 0 or a positive number")
        return Divergence(self.beta, self.temperature, self.top_k, self.add_tail)

    def keep_rows(self, batch: LocalBatch, part: slice, rows: RowDivergences) -> None:
        """Look at the divergences of some of a micro-batch's targets, in a class of one's own."""


class TeacherPasses:
    """A teacher's passes over the micro-batches of a step or an evaluation, and its logits of rows with a target."""

    likeliest = 0  # no tables are read

    def __init__(self, teacher: nn.Module, plan: Plan, world: World) -> None:
        self._teacher: Any = teacher
        self._plan = plan
        self._world = world
        # The last hidden states (n, D) of a micro-batch's targets, and the teacher's head.
        self._targets: tuple[Tensor, OutputHead] | None = None

    def check_models(self, inputs: StepInputs) -> None:
        """Raise LossError for models that cannot be student and teacher, and what `check_step_arguments` raises for the
        teacher; entered by all ranks.
        """
        teacher, student = self._teacher, inputs.language_model
        reason = None
        if not isinstance(teacher, nn.Module) or not is_prepared(teacher) or not is_prepared(student):
            reason = "student and teacher are models that longspan.prepare returns; prepare both in one world"
        elif is_multimodal(inputs.model) or is_multimodal(teacher):
            reason = "a MultimodalModel has no teacher; distil its language model over documents without items"
        elif is_pipeline(student) or is_pipeline(teacher):
            reason = f"the home has pp {inputs.world.home.pp}; use a home without pp"
        elif shared := {id(p) for p in teacher.parameters()} & {id(p) for p in student.parameters()}:
            reason = (
                f"teacher and student share {len(shared)} parameters: the base under an adapter is where the student "
                "began, and teaches nothing; load another model"
            )
        elif trained := [name for name, p in teacher.named_parameters() if p.requires_grad]:
            reason = (
                f"{len(trained)} parameters of the teacher would be trained ({trained[0]}); call requires_grad_(False) "
                "on the model before longspan.prepare"
            )
        elif score_columns(teacher):
            reason = f"the teacher {architecture_name(teacher)} makes scores, and no distribution of tokens"
        elif mtp_depths(teacher) or mtp_depths(student):
            reason = "depths of multi-token prediction have no teacher; load both models without them"
        raise_first_error(self._world, None if reason is None else LossError(f"Distillation: {reason}"))
        check_step_arguments(teacher, inputs.plan, inputs.documents, inputs.world, backward=False)

    def check_ids(self, batches: Sequence[LocalBatch]) -> DataError | None:
        """Return the error of ids of these batches that the teacher has not; None without any."""
        size = self._teacher.get_input_embeddings().num_embeddings
        largest = max(
            (int(ids.max()) for batch in batches for ids in (batch.ids, batch.labels) if len(ids)), default=0
        )
        if largest < size:
            return None
        return DataError(
            f"the documents have token {largest}, and the teacher's vocabulary has {size}; student and teacher need "
            "one tokenizer"
        )

    @contextmanager
    def passes_context(self) -> Iterator[None]:
        """Keep the teacher in evaluation mode inside, in free plans with whole weights; frees them at the end."""
        with preserve_modes(self._teacher):
            self._teacher.eval()
            try:
                if self._plan.mode == "free":
                    with keep_parameters_whole(self._teacher):
                        yield
                else:
                    yield
            finally:
                self.end_micro_batch()
                reshard(self._teacher)

    def run(self, batch: LocalBatch, inputs: Mapping[str, Any]) -> None:
        """Run the teacher over a micro-batch, with the model's inputs, before the student's pass."""
        rows = to_device(target_rows(batch), self._world.device)

        def keep_targets(hidden: Tensor, head: OutputHead) -> Tensor:
            self._targets = hidden.index_select(0, rows), head
            return hidden.new_zeros(())

        with torch.no_grad():
            self._teacher(**inputs, row_loss=keep_targets)

    def _kept_targets(self) -> tuple[Tensor, OutputHead]:
        assert self._targets is not None, "the teacher's pass comes before its student's"
        return self._targets

    @property
    def vocabulary(self) -> int:
        """How many columns its logits have that are formed here."""
        return self._kept_targets()[1].vocabulary

    def gather_head(self) -> None:
        """Gather the teacher's head before the student's, which slots without targets gather too: all ranks enter."""
        _ = self._kept_targets()[1].parameters

    def compare(
        self, divergence: Divergence, logits: Tensor, part: slice, weights: Tensor | None
    ) -> RowDivergences:
        """Compare the student's logits (t, V) of some of the micro-batch's targets with the teacher's."""
        return divergence.compare_rows(logits, self.logits(part), weights)

    def logits(self, part: slice) -> Tensor:
        """Return the logits (t, V) of some of the micro-batch's targets."""
        hidden, head = self._kept_targets()
        with torch.no_grad():
            return head(hidden[part])

    def measure_rows(self, divergence: Divergence, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the divergences (t,) of some targets' logits (t, V), and whether both models' likeliest tokens are the
        same, of those that both have.
        """
        teacher_logits = self.logits(part)
        columns = min(logits.shape[1], teacher_logits.shape[1])
        first, second = (x[:, :columns].argmax(-1) for x in (logits, teacher_logits))
        return divergence.compare_rows(logits, teacher_logits, None).losses, first == second

    def end_micro_batch(self) -> None:
        """Free what is left of the teacher's pass, and what is gathered of its head."""
        if self._targets is not None:
            self._targets[1].release()
        self._targets = None


TeacherComparison = TeacherPasses | TableComparison


def compare_with_teacher(loss: Distillation, inputs: StepInputs) -> TeacherComparison:
    """Return what compares a model's rows with a teacher, or with its tables, once it is known that it can; entered by
    all ranks.
    """
    if isinstance(loss.teacher, TeacherTables):
        comparison = TableComparison(loss.teacher)
    else:
        comparison = TeacherPasses(loss.teacher, inputs.plan, inputs.world)
    comparison.check_models(inputs)
    return comparison


class DistillationTerm(Term):
    """The loss of a step under a teacher; made by all ranks together.

    Raises LossError, on every rank, for what no distillation is made of, and CommError where ranks have different
    losses.
    """

    def __init__(
        self, loss: Distillation, divisor: float | None, inputs: StepInputs, chunk_rows: int, scores: int
    ) -> None:
        self._world = inputs.world
        self._loss = loss
        self._chunk_rows = chunk_rows
        plan = inputs.plan
        self._target_count = float(max(plan.targets, 1))
        compared = (loss.beta, loss.temperature, loss.top_k, loss.add_tail, loss.cross_entropy_weight)

        def make_divergence() -> tuple[Divergence, float, object]:
            if scores:
                raise LossError(
                    "a Distillation is of distributions of tokens, and the model makes scores; leave it out"
                )
            if isinstance(loss.teacher, TeacherTables):
                loss.teacher.check_settings(loss.top_k, loss.temperature)
            return loss.divergence(), self._target_count, compared

        self._divergence, self.divisor = agree_on_loss(make_divergence, divisor, inputs.world)
        self._teacher = compare_with_teacher(loss, inputs)
        self.likeliest = self._teacher.likeliest
        self._sums = torch.zeros(len(FIGURES), dtype=torch.float64, device=inputs.world.device)

    def read(self, batches: Sequence[LocalBatch]) -> None:
        """Raise DataError, on every rank, for ids that the teacher has not; entered by all ranks."""
        raise_first_error(self._world, self._teacher.check_ids(batches))

    def extend_passes(self, passes: Passes) -> Passes:
        if passes.temperature != 1:
            raise LossError(
                f"temperature is {passes.temperature:g} beside a Distillation, which has its own for both models; give "
                f"Distillation(…, temperature={passes.temperature:g})"
            )
        return replace(passes, loss_fn=self._sum_losses, divisor=self.divisor, run_before=self._teacher.run)

    def passes_context(self, batches: Sequence[LocalBatch]) -> AbstractContextManager[None]:
        return self._teacher.passes_context()

    def sums(self) -> Tensor:
        return self._sums

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return the figures."""
        divisors = (self.divisor, self.divisor, self._target_count, self._target_count)
        values = zip(FIGURES, sums, divisors, strict=True)
        return {"figures": {name: value / divisor for name, value, divisor in values}}

    def _sum_losses(self, batch: LocalBatch, hidden: Tensor, head: Head) -> Tensor:
        """The sum of the losses of a micro-batch's rows (T, D), a float64 scalar."""
        rows = target_rows(batch)
        targets = Targets(to_device(rows, hidden.device), to_device(batch.labels[rows], hidden.device))
        weights = None
        if WEIGHTS in batch.values:
            weights = to_device(batch.values[WEIGHTS][rows], hidden.device)
        self._teacher.gather_head()
        chunk_rows = self._chunk_rows or rows_of_two_heads(head.vocabulary, self._teacher.vocabulary, hidden)
        total = chunked_loss(hidden, targets, partial(self._sum_chunk, batch, targets, weights), head, chunk_rows)
        self._teacher.end_micro_batch()
        return total

    def _sum_chunk(
        self,
        batch: LocalBatch,
        targets: Targets,
        weights: Tensor | None,
        log_probs: Tensor,
        part: slice,
        logits: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The losses' sum and their gradient at the logits (t, V), or log-probabilities in its place where there is
        none; a LossOfRows."""
        wants_gradient = torch.is_grad_enabled()
        with torch.no_grad():
            row_weights = torch.ones_like(log_probs) if weights is None else weights[part].to(log_probs.dtype)
            rows = self._teacher.compare(self._divergence, logits, part, row_weights if wants_gradient else None)
            self._loss.keep_rows(batch, part, rows)
            kl = (row_weights * rows.losses).sum(dtype=torch.float64)
            ce = -(row_weights * log_probs).sum(dtype=torch.float64)
            self._sums += torch.stack([kl, ce, rows.entropies.sum().double(), rows.teacher_mass.sum().double()])
            loss = kl + self._loss.cross_entropy_weight * ce
            gradient = rows.gradient
            if gradient is None:
                return loss, log_probs
            if self._loss.cross_entropy_weight:
                slopes = -self._loss.cross_entropy_weight * row_weights
                gradient += target_log_probs_and_gradient(logits, targets.ids[part])[1](slopes)
            return loss, gradient

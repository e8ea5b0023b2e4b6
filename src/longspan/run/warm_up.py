"""The warm-up of a run on GPUs: before step 1, compile kernels and allocate memory on all ranks, with synthetic
documents.

FlashAttention-4 and Triton compile for each kind of group, NCCL connects each pair of ranks, and the allocator requests
memory from the driver. The largest micro-batch of the coming plans runs first, whole: that the run fits is seen there.
What follows has documents that are cut short: each kind of group in these plans, once on all slots, and the forward
passes that evaluation adds. Weights, moments, random numbers and every later loss are as without a warm-up.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.comm import World
from longspan.comm.all_ranks import LogLine
from longspan.comm.device import is_out_of_memory, peak_memory_bytes
from longspan.config.plan_section import ONE_DEGREE
from longspan.data.document import NO_TARGET, count_targets
from longspan.data.scored_document import ScoredDocument
from longspan.data.synthetic_documents import SyntheticDocument
from longspan.errors import plural
from longspan.layout import Integers
from longspan.model.compiled_layers import compiled_graphs_text
from longspan.model.kinds import score_columns
from longspan.model.layers import vocabulary_size
from longspan.model.marks import find_language_model
from longspan.plan import Group, MicroBatch, Plan
from longspan.plan.step_times import slot_rows
from longspan.resolve.kept_rows import SlotRowsError
from longspan.resolve.planner_config import StepPlanner
from longspan.run.run_data import TrainingRun
from longspan.train.optim.optimizer import allocate_adam_states
from longspan.train.rows.read_rows import WEIGHTS
from longspan.train.start.start_times import Starts
from longspan.train.step import run_step
from longspan.train.terms.loss_tokens import LossTokens
from longspan.train.training import Training

# FlashAttention-4 (4.0.0b36) compiles for packed documents, for more than 256 of them, and where the longest tile has
# no more rows than fit a block: of 64, 80 or 128 queries (128 / query heads of a key head, forward), and 128 keys.
MANY = 256
SHORT_STEP = 8
SHORT = 128  # chunks of up to SHORT rows are told apart in units of SHORT_STEP rows
LONG = 4 * SHORT  # rows to which chunks are cut: their kernels are those of any longer ones
CONNECTED = 16  # slots, at most, of which every pair is connected where plans are dynamic
COMING = 32  # steps whose plans are looked at
# Dynamic plans take a while each.
COMING_DYNAMIC = 4


def group_kind(group: Group) -> tuple[object, ...]:
    """Return what the kernels and messages of a group depend on: groups of one kind need no further compilation,
    however many rows they have.
    """
    rows = group.laid_out
    chunks = 2 * group.degree
    longest_chunk = -(-max(rows) // chunks)
    messages = group.degree, group.cp_comm_type, group.hierarchical_context_parallel_sizes, group.partition
    has_several = len(rows) > 1
    has_many = len(rows) > MANY
    # documents with a row in every chunk: none, one, several
    in_all_chunks = min(2, sum(n >= chunks for n in rows))
    short_chunk_steps = -(-longest_chunk // SHORT_STEP) if longest_chunk <= SHORT else 0  # 0: a long one
    return *messages, has_several, has_many, group.parents is not None, in_all_chunks, short_chunk_steps


def smallest_group_of_each_kind(plans: Iterable[Plan]) -> dict[tuple[object, ...], Group]:
    """Return the group with the fewest rows of a slot for each kind (`group_kind`), by kind; the first is the one that
    has most of these rows.
    """
    smallest: dict[tuple[object, ...], Group] = {}
    for plan in plans:
        for group in plan.groups:
            kind = group_kind(group)
            if kind not in smallest or group.rows_per_slot < smallest[kind].rows_per_slot:
                smallest[kind] = group
    return dict(sorted(smallest.items(), key=lambda item: -item[1].rows_per_slot))


def largest_micro_batch(plans: Sequence[Plan]) -> MicroBatch:
    """Return the micro-batch, of all plans, in which a slot has most rows."""
    batches = [(plan, batch) for plan in plans for batch in plan.micro_batches]
    return max(batches, key=lambda item: int(slot_rows((item[1],), item[0].slots, item[0].row_multiple).max()))[1]


def shorten_group(group: Group) -> Group:
    """Return a group of the same kind whose documents have at most LONG rows in a chunk; a padded one as it is."""
    if group.pad_to is not None:
        return group
    return replace(group, lengths=tuple(min(n, 2 * group.degree * LONG) for n in group.lengths))


def repeat_on_all_slots(group: Group, slots: int) -> list[MicroBatch]:
    """Return micro-batches, one or two, in which every slot belongs to a copy of this group; copies share documents."""
    degree = group.degree
    filled_slots = slots // group.degree * group.degree
    blocks = [tuple(range(first, first + degree)) for first in range(0, filled_slots, degree)]
    batches = [MicroBatch(tuple(replace(group, slots=block) for block in blocks))]
    if filled_slots < slots:  # the degree does not divide the slots
        batches.append(MicroBatch((replace(group, slots=tuple(range(slots - degree, slots))),)))
    return batches


def make_plan_like(plan: Plan, batches: Sequence[MicroBatch]) -> Plan:
    """Make a plan of these micro-batches, with documents numbered anew, under the settings of another plan."""
    lengths = list[int]()
    numbered = list[MicroBatch]()
    for batch in batches:
        groups = list[Group]()
        for group in batch.groups:
            documents = tuple(range(len(lengths), len(lengths) + len(group.lengths)))
            groups.append(replace(group, documents=documents))
            lengths += group.lengths
        numbered.append(MicroBatch(tuple(groups)))
    return Plan(
        slots=plan.slots,
        lengths=tuple(lengths),
        micro_batches=tuple(numbered),
        targets=sum(lengths) - len(lengths),
        mode=plan.mode,
        node_size=plan.node_size,
        row_multiple=plan.row_multiple,
        planner="warm-up",
        cost=plan.cost,
    ).check()


def run_warm_up(training: Training, plans: Sequence[Plan], evaluation: Plan | None, log: LogLine) -> None:
    """Run the warm-up of these plans of coming steps and of evaluation, and log its time and peak memory; entered by
    all ranks, with the same plans. Raises SlotRowsError on a rank that runs out of memory.

    It makes the plans' groups and the optimizer's states; no gradient and no update is left.
    """
    started = time.perf_counter()
    world = training.world
    coming = [*plans, *([evaluation] if evaluation else [])]
    work = plan_warm_up(plans, evaluation, in_flight=world.home.pp * training.config.parallel.vpp)
    kinds = plural(len(smallest_group_of_each_kind(coming)), "kind")
    steps = plural(len(plans), "coming step")
    log(
        f"compiling kernels and finding memory: {kinds} of groups in {steps}{' and evaluation' if evaluation else ''}"
    )
    try:
        allocate_adam_states(training.optimizer)
        for plan in coming:  # make their groups
            world.prepare(plan)
        config = training.config
        mixing_planners = {config.context.planner, config.evaluation.planner} - set(ONE_DEGREE)
        if mixing_planners and world.home.slots <= CONNECTED:  # plans that mix degrees may need any group later
            world.channels.connect_pairs()
        for i, plan in enumerate(work):  # the first is of training, the second of evaluation
            _run_plan(training, plan, backward=i == 0)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise SlotRowsError(
            f"rank {world.rank} ran out of memory before step 1, in a micro-batch of up to {work[0].most_rows:,} rows "
            f"of a slot ({str(error).partition('. ')[0]}); context.max_tokens_per_slot is "
            f"{training.config.context.max_tokens_per_slot}: lower it, recompute activations "
            "(train.activation_checkpointing), or start more processes"
        ) from error
    finally:
        training.model.zero_grad(set_to_none=True)
    peak = f"at most {peak_memory_bytes(world.device) / 2**30:.1f} GiB"
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
        peak += f" of {torch.cuda.memory_reserved(world.device) / 2**30:.1f} GiB reserved"
    world.control.barrier("end of the warm-up")
    if text := compiled_graphs_text():
        log(text)
    log(f"kernels compiled and memory found in {time.perf_counter() - started:.1f} s: {peak} on the first rank")


def plan_warm_up(plans: Sequence[Plan], evaluation: Plan | None, *, in_flight: int) -> list[Plan]:
    """Plan the warm-up of plans of training, and of evaluation if there is one: a plan of each, which has the largest
    micro-batch first, and then each kind of group on all slots, cut short.

    Training has as many copies of its largest micro-batch as a pipeline holds at once (`in_flight`), so that the peak
    is reached. That of evaluation is cut short too if no slot has more rows in it than in training, and of evaluation's
    kinds only those follow that training does not have.
    """
    training_kinds = smallest_group_of_each_kind(plans)
    slots = plans[0].slots
    training_batches = [largest_micro_batch(plans)] * in_flight
    for group in training_kinds.values():
        training_batches += repeat_on_all_slots(shorten_group(group), slots)
    training = make_plan_like(plans[0], _pad_to_multiple(training_batches, in_flight))
    if evaluation is None:
        return [training]
    largest = largest_micro_batch([evaluation])
    if make_plan_like(evaluation, [largest]).most_rows <= training.most_rows:
        largest = MicroBatch(tuple(map(shorten_group, largest.groups)))
    batches = [largest]
    for kind, group in smallest_group_of_each_kind([evaluation]).items():
        if kind not in training_kinds:
            batches += repeat_on_all_slots(shorten_group(group), evaluation.slots)
    return [training, make_plan_like(evaluation, _pad_to_multiple(batches, in_flight))]


def _pad_to_multiple(batches: list[MicroBatch], multiple: int) -> list[MicroBatch]:
    """Pipelines need a multiple."""
    return batches + batches[-1:] * (-len(batches) % multiple)


class _Prefix(SyntheticDocument):
    """A synthetic prefix, which other documents continue: none of its tokens is a target."""

    targets = 0
    ahead = 1 << 20  # tokens behind it, more than depths of multi-token prediction read

    def labels(self, positions: Integers) -> Integers:
        return np.full(len(positions), NO_TARGET)


def _run_plan(training: Training, plan: Plan, *, backward: bool) -> None:
    """Entered by all ranks. With `backward` gradients are left on the parameters, and the losses of routers and
    depths are computed too. For a model that scores the last row of each document is scored."""
    model = find_language_model(training.model)
    prefixes = set(plan.parents or ())
    parents = plan.parents or (-1,) * len(plan.lengths)
    # 2: any ids do where a model has no embedding that would say how many there are
    documents = [
        (_Prefix if document in prefixes else SyntheticDocument)(
            document, rows, vocabulary_size(model) or 2, parent
        )
        for document, (rows, parent) in enumerate(zip(plan.lengths, parents, strict=True))
    ]
    options: dict[str, Any] = {"router": training.router, "mtp": training.mtp_loss} if backward else {}
    options["loss"] = training.distillation
    if score_columns(model):
        documents = [_make_scored(document) for document in documents]
        options["loss"] = _sum_scores
    counted_plan = replace(plan, targets=sum(map(count_targets, documents)))
    run_step(model, counted_plan, documents, training.world, backward=backward, **options)


def _make_scored(document: SyntheticDocument) -> ScoredDocument:
    """No row of a prefix is scored."""
    no_rows = np.arange(0)
    scored = ScoredDocument(
        document[np.arange(len(document))], rows=no_rows if isinstance(document, _Prefix) else None
    )
    scored.parent = document.parent
    return scored


def _sum_scores(scores: Tensor, at: LossTokens) -> Tensor:
    """The weighted sum of a row's scores: every score gets a gradient."""
    return scores.reshape(len(at), -1).sum(-1) * at[WEIGHTS]


def warm_up_coming_steps(run: TrainingRun, log: LogLine, starts: Starts) -> None:
    """Run the warm-up of a run's next steps and its evaluation of held-out documents; entered by all ranks."""
    if run.done == run.config.train.steps:
        return
    planner = StepPlanner(run.training_choice, run.order, run.world.home)
    count = COMING if run.training_choice.has_one_degree else COMING_DYNAMIC
    plans = [planner(step) for step in range(run.done, min(run.done + count, run.config.train.steps))]
    evaluation = run.evaluation_choice().plan(run.held_out.lengths, run.world.home) if run.held_out else None
    starts.end_part("coming plans")
    run_warm_up(run, plans, evaluation, log)


def needs_warm_up(world: World) -> bool:
    return world.device.type == "cuda"

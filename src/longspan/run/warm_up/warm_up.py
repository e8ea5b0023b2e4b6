"""Kernels are compiled and memory is found before step 1, on all ranks at once, over documents that no one learns from.

What takes time once: FlashAttention-4 and Triton compile for each kind of group, NCCL connects each pair of ranks, CUDA
loads each kernel and the allocator asks the driver for memory. The largest micro-batch of coming plans runs first, into
whose memory all others fit; then each kind of group that these plans hold, once on all slots; then the first plan as it
is, and what evaluation adds, forward alone. Gradients are cleared; weights, moments, learning rate and random numbers
are as before, and so is every later loss.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from longspan.comm.all_ranks import LogLine
from longspan.comm.failure.watch import is_out_of_memory
from longspan.data.synthetic import synthetic_documents
from longspan.errors import ConfigError, counted
from longspan.model.multimodal.multimodal_model import language_model_of
from longspan.model.prepared import vocabulary_size
from longspan.plan import Plan
from longspan.plan.timeline import slot_rows
from longspan.run.warm_up.kinds import Kind, largest_micro_batch, on_all_slots, plan_of, smallest_of_each_kind
from longspan.run.warm_up.optimizer_states import make_states
from longspan.train.memory.live_bytes import peak_memory_bytes
from longspan.train.step import run_step
from longspan.train.terms.mtp import mtp_loss
from longspan.train.training import Training

CONNECTED = 16  # slots, at most, of which every pair is connected where plans are dynamic


@dataclass(frozen=True)
class WarmUp:
    """The plans that a warm-up runs, one after another, and how many kinds of groups they hold."""

    kinds_of_training: Plan
    first: Plan
    evaluation: Plan | None
    kinds: int


def warm_up(training: Training, plans: Sequence[Plan], evaluation: Plan | None, log: LogLine) -> None:
    """Run what stands for these plans of coming steps and of evaluation; entered by all ranks, with the same plans.

    Raises ConfigError, on the rank concerned alone, where its memory does not suffice; the others raise CommError,
    which quotes it.
    """
    started, device = time.perf_counter(), training.world.device
    work = warm_up_plans(plans, evaluation, in_flight=training.world.home.pp * training.config.parallel.vpp)
    kinds, steps = counted(work.kinds, "kind") + " of groups", counted(len(plans), "coming step")
    log(f"compiling kernels and finding memory: {kinds} in {steps}{' and evaluation' if evaluation else ''}")
    try:
        make_states(training.optimizer)
        _connect(training, [*plans, *([evaluation] if evaluation else [])])
        for plan in (work.kinds_of_training, work.first):
            _run(training, plan, backward=True)
        if work.evaluation is not None:
            _run(training, work.evaluation, backward=False)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(training, work, error) from error
    finally:
        training.model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    training.world.control.barrier("end of the warm-up")
    log(f"kernels compiled and memory found in {time.perf_counter() - started:.1f} s: {_memory(device)}")


def warm_up_plans(plans: Sequence[Plan], evaluation: Plan | None, *, in_flight: int) -> WarmUp:
    """What stands for some plans, with `in_flight` of the largest micro-batch, as many as a pipeline holds at once."""
    groups = smallest_of_each_kind(plans)
    batches = [largest_micro_batch(plans)] * in_flight
    batches += [batch for group in groups.values() for batch in on_all_slots(group, plans[0].slots)]
    batches += batches[-1:] * (-len(batches) % in_flight)
    forward = None if evaluation is None else _forward_plan(evaluation, groups, in_flight)
    both = [*plans, *([evaluation] if evaluation else [])]
    return WarmUp(plan_of(batches, plans[0]), plans[0], forward, len(smallest_of_each_kind(both)))


def _forward_plan(evaluation: Plan, known: Iterable[Kind], in_flight: int) -> Plan:
    """What evaluation adds: its own kinds, and its largest micro-batch."""
    groups = smallest_of_each_kind([evaluation], leave_out=known)
    batches = [largest_micro_batch([evaluation])]
    batches += [batch for group in groups.values() for batch in on_all_slots(group, evaluation.slots)]
    return plan_of(batches + batches[-1:] * (-len(batches) % in_flight), evaluation)


def _connect(training: Training, plans: Sequence[Plan]) -> None:
    """Make the communicators of coming plans; where these are dynamic, let every pair of slots meet."""
    world, context = training.world, training.config.context
    for plan in plans:
        world.prepare(plan)
    if "dynamic" in (context.planner, context.eval_planner) and world.home.slots <= CONNECTED:
        world.channels.connect_pairs()


def _run(training: Training, plan: Plan, *, backward: bool) -> None:
    model, chunk = language_model_of(training.model), training.config.train.loss_chunk_rows
    documents = synthetic_documents(plan.lengths, vocabulary_size(model) or 2)
    router, mtp = (training.router, mtp_loss(training.config)) if backward else (None, None)
    plan = replace(plan, targets=plan.tokens - len(plan.lengths))  # of made documents, which mask nothing
    run_step(model, plan, documents, training.world, backward=backward, loss_chunk_rows=chunk, router=router, mtp=mtp)


def _memory(device: torch.device) -> str:
    """What the first rank has held at most, and what its allocator keeps of a GPU."""
    line = f"at most {peak_memory_bytes(device) / 2**30:.1f} GiB"
    if device.type == "cuda":
        line += f" of {torch.cuda.memory_reserved(device) / 2**30:.1f} GiB reserved"
    return f"{line} on the first rank"


def _too_large(training: Training, work: WarmUp, error: BaseException) -> ConfigError:
    """The error of a rank without memory for what stands for the coming plans."""
    plan = work.kinds_of_training
    rows = int(slot_rows(plan.micro_batches, plan.slots, plan.row_multiple).max())
    cap = training.config.context.max_tokens_per_slot
    return ConfigError(
        f"rank {training.world.rank} ran out of memory before step 1, in a micro-batch of up to {rows:,} rows of a "
        f"slot ({str(error).partition('. ')[0]}); context.max_tokens_per_slot is {cap}: lower it, "
        "recompute activations (train.activation_checkpointing), or start more processes"
    )

"""The end of a step: gradient norm, sums over ranks, what is checked of them, and the update.

AdamW in one pass is launched before the host knows the norm: where it is not finite, the factor that clips is no number
and changes nothing. Other optimizers, CPUs and pipelines update once the host has checked the sums.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.comm import World, to_device
from longspan.comm.channel import Channel
from longspan.data.document import NO_TARGET
from longspan.errors import PlanError
from longspan.model.marks import is_pipeline
from longspan.train.gradient_norm import model_gradient_square_sum, scale_to_norm
from longspan.train.nonfinite import check_finite
from longspan.train.optim.offload_states import OffloadedStates
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.passes import Passes
from longspan.train.rows.read_rows import LocalBatch

SUMS_NAME = "loss and gradient norm"  # the name of the collective in errors


class StepSums(NamedTuple):
    """What a step has in sum over all ranks: its loss, the norm of its gradients, and the numbers of each term."""

    loss: float
    norm: float  # 0 without a backward pass
    by_term: list[list[float]]


@dataclass(frozen=True)
class StepEnd:
    """What the end of a step works on: the caller's model, the passes that ran, their batches, and how to update.

    All ranks call `finish_step` together, once. `optimizer` None only sums.
    """

    model: nn.Module
    passes: Passes
    batches: Sequence[LocalBatch]
    optimizer: Optimizer | None
    max_grad_norm: float | None
    host_work: Callable[[], None]  # the host's work for the next step, before it waits for the device

    @property
    def world(self) -> World:
        return self.passes.world

    def finish_step(self, loss_sum: Tensor) -> StepSums:
        """Sum this rank's loss and gradients over all ranks, check them, and update the model if there is an optimizer.

        AdamW in one pass clips inside and leaves `.grad`. Raises PlanError where targets are missing, NonFiniteError
        where the loss or the norm is not finite, on every rank: weights and the optimizer's state are as before the
        step.
        """
        passes = self.passes
        language_model: Any = passes.model
        # Targets are counted where losses are made, in a pipeline by its last stage.
        makes_loss = not is_pipeline(language_model) or any(stage.last for stage in language_model.stages)
        targets = sum(int((batch.labels != NO_TARGET).sum()) for batch in self.batches) if makes_loss else 0
        numbers = [loss_sum, [targets], *(term.sums() for term in passes.terms)]
        slot_sums = [torch.as_tensor(x, dtype=torch.float64).detach().flatten() for x in numbers]
        # The tensor-parallel ranks of a slot have the same sums: the first adds them, the others zeros.
        if self.world.coordinates.tp:
            slot_sums = [torch.zeros(len(x), dtype=torch.float64) for x in slot_sums]
        squares = torch.zeros(1, dtype=torch.float64)
        # The squares are those of the whole model, encoders included.
        if passes.backward:
            squares = model_gradient_square_sum(self.model, self.world, as_reduced=True).flatten()
        # What this rank adds to the sums: squares of gradients, loss, targets, and numbers of each term, each (n,) in
        # float64, on the host or the device.
        pieces = [squares, *slot_sums]
        inner = self.optimizer.inner if isinstance(self.optimizer, OffloadedStates) else self.optimizer
        one_pass = inner if isinstance(inner, OnePassAdamW) else None
        if one_pass is not None and sums_stay_on_device(self.world):
            return self._sum_and_update_on_device(one_pass, pieces)
        self.host_work()
        values = [x for piece in pieces for x in piece.tolist()]
        sums = self._split_and_check_sums(self.world.control.sum_over_ranks(values, SUMS_NAME), pieces)
        if self.optimizer is None:
            return sums
        if one_pass is not None:
            # torch clips so.
            factor = 1.0 if self.max_grad_norm is None else self.max_grad_norm / (sums.norm + 1e-6)
            scale = to_device(np.array(factor), self.world.device) if factor < 1 else None
            with _scaled_gradients(one_pass, scale):
                self.optimizer.step()
            return sums
        if self.max_grad_norm is not None:
            scale_to_norm(self.model.parameters(), self.max_grad_norm, sums.norm)
        self.optimizer.step()
        return sums

    def _sum_and_update_on_device(self, one_pass: OnePassAdamW, pieces: Sequence[Tensor]) -> StepSums:
        """AdamW's update is launched before the host has read and checked the sums. Gradients are scaled by at most
        1, and by NaN where the step must not be taken: the norm or the loss is not finite, or targets are
        missing. An update that goes on behind the next forward pass cannot be taken back: it begins once the host
        has checked the sums. `pieces` are this rank's squares of gradients, loss, targets, and numbers of each
        term."""
        assert self.optimizer is not None
        device = self.world.device
        on_device = [x if x.device == device else to_device(x.numpy(), device) for x in pieces]
        values = sum_over_home_on_device(torch.cat(on_device), self.world)
        copy = HostCopy(values)
        norm = values[0].sqrt()
        loss = values[1] / self.passes.divisor
        targets = values[2]
        is_good = norm.isfinite() & loss.isfinite() & (targets == self.passes.plan.targets)
        norm_limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        scale = torch.where(is_good, (norm_limit / (norm + 1e-6)).clamp(max=1.0), math.nan)
        with _scaled_gradients(one_pass, scale):
            if isinstance(self.optimizer, OffloadedStates) and self.optimizer.hides_updates:
                self.host_work()
                sums = self._split_and_check_sums(copy.wait(), pieces)
                self.optimizer.step()
                return sums
            self.optimizer.step()
        self.host_work()
        try:
            return self._split_and_check_sums(copy.wait(), pieces)
        except BaseException:
            # The scale was no number: nothing but the counts has changed.
            one_pass.undo_step_counts(self.optimizer.state)
            raise

    def _split_and_check_sums(self, values: Sequence[float], pieces: Sequence[Tensor]) -> StepSums:
        """The sums are in the order of `pieces`, and the same on every rank."""
        squares, loss_sum, targets, *term_numbers = values
        if targets != self.passes.plan.targets:
            raise PlanError(
                f"the slots counted {targets:.0f} targets, the plan has {self.passes.plan.targets}; is a document left "
                "out?"
            )
        # The numbers are those of the pieces after squares, loss and targets.
        numbers = iter(term_numbers)
        sums = StepSums(loss_sum, math.sqrt(squares), [list(islice(numbers, len(piece))) for piece in pieces[3:]])
        if self.optimizer is not None:
            check_finite(
                self.model,
                self.world,
                loss=sums.loss / self.passes.divisor,
                norm=sums.norm,
                nonfinite_inputs=lambda: [name for term in self.passes.terms for name in term.nonfinite_inputs()],
            )
        return sums


@contextmanager
def _scaled_gradients(optimizer: OnePassAdamW, scale: Tensor | None) -> Iterator[None]:
    optimizer.gradient_scale = scale
    try:
        yield
    finally:
        optimizer.gradient_scale = None


def sums_stay_on_device(world: World) -> bool:
    """Return whether a step's sums stay on the device until the update is launched; a pipeline adds them on hosts."""
    return world.device.type == "cuda" and world.home.pp == 1


def sum_over_home_on_device(values: Tensor, world: World) -> Tensor:
    """Sum values (n,) of all ranks of a home without pipeline, on the device: the same bits on every rank, which all
    enter.
    """
    channels = world.channels
    if world.home.slots > 1:
        values = _sum_over_channel(channels.find_channel(range(world.home.slots)), values)
    return _sum_over_channel(channels.tp, values) if world.home.tp > 1 else values


def _sum_over_channel(channel: Channel, values: Tensor) -> Tensor:
    """Values (n,) are added in the order of ranks: the same bits on every rank."""
    return torch.stack(channel.all_gather(values[None], [1] * channel.degree, SUMS_NAME).wait()).sum(0)[0]


class HostCopy:
    """A copy of a tensor on its way to the host: `wait` returns its numbers, and waits for nothing launched later."""

    def __init__(self, values: Tensor) -> None:
        """Launch the copy of `values` on the current stream; of a tensor on the host there is nothing to copy."""
        self._on_host = values
        self._arrived = None
        if values.is_cuda:
            self._on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._on_host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[float]:
        """Return the numbers, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host.tolist()

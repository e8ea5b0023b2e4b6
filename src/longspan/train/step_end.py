"""The end of a step: its sums over ranks, what is checked of them, and the update.

AdamW in one pass is launched before the host knows the norm: the sums of a step, and the factor that clips, stay on the
device, and a loss or a norm that is not finite makes the factor no number, with which the update changes nothing. The
host prepares the next step meanwhile and reads the sums while the update runs. So the device waits for the host neither
before the update nor, as long as the update runs, before the next step. Other optimizers are called once the host has
checked the sums, and so are all on CPUs and in pipelines, whose stages exchange sums on the host.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.comm import World, to_device
from longspan.comm.groups.channel import Channel
from longspan.data.document import NO_TARGET
from longspan.errors import PlanError
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.train.gradients import check_finite, clip_gradients, model_square_sum
from longspan.train.optim.offload_states import OffloadedStates
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.passes import Passes
from longspan.train.reading.read_rows import LocalBatch

SUMS_NAME = "loss and gradient norm"  # the name of the collective in errors


class StepSums(NamedTuple):
    """What a step has in sum over all ranks: its loss, the norm of its gradients, and the numbers of each term."""

    loss: float
    norm: float  # 0 without a backward pass
    of_terms: list[list[float]]


@dataclass(frozen=True)
class StepEnd:
    """What the end of a step works on. All ranks call `finish_step` together."""

    model: nn.Module
    passes: Passes
    batches: Sequence[LocalBatch]
    optimizer: Optimizer | None
    max_grad_norm: float | None
    meanwhile: Callable[[], None] | None = None  # the host's work for the next step, before it waits for the device

    @property
    def world(self) -> World:
        """The world of the step."""
        return self.passes.world

    def finish_step(self, loss_sum: Tensor) -> StepSums:
        """Sum this rank's loss and gradients over all ranks, check them, and update the model if there is an optimizer.

        Raises PlanError where targets are missing, NonFiniteError where the loss or the norm is not finite, on every
        rank: weights and the optimizer's state are as before the step.
        """
        pieces, one_pass = self._rank_sums(loss_sum), find_one_pass(self.optimizer)
        if one_pass is not None and sums_on_device(self.world):
            return self._finish_on_device(one_pass, pieces)
        self._work_meanwhile()
        sums = self._make_sums(self.world.control.sum_over_ranks(_read_pieces(pieces), SUMS_NAME), pieces)
        self._check_sums(sums)
        self._update(one_pass, sums)
        return sums

    def _finish_on_device(self, one_pass: OnePassAdamW, pieces: Sequence[Tensor | list[float]]) -> StepSums:
        """Launch the sums and the update, and read the sums while it runs."""
        assert self.optimizer is not None
        values = gather_and_add(_join_pieces(pieces, self.world.device), self.world)
        one_pass.gradient_scale = self._clip_factor(values)
        copy = HostCopy(values)
        try:
            self.optimizer.step()
        finally:
            one_pass.gradient_scale = None
        self._work_meanwhile()
        try:
            sums = self._make_sums(copy.wait(), pieces)
            self._check_sums(sums)
        except BaseException:
            one_pass.take_back_counts(self.optimizer.state)  # its scale was no number: nothing else has changed
            raise
        return sums

    def _work_meanwhile(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()

    def _clip_factor(self, values: Tensor) -> Tensor:
        """Return the factor of the gradients, on the device: not a number where the step must not be taken.

        The factor brings their norm down to the limit, and is 1 at most. No rank waits for the device to learn it.
        `values` are summed over all ranks, in the order of `_rank_sums`.
        """
        norm, loss, targets = values[0].sqrt(), values[1] / self.passes.divisor, values[2]
        is_good = norm.isfinite() & loss.isfinite() & (targets == self.passes.plan.targets)
        norm_limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return torch.where(is_good, (norm_limit / (norm + 1e-6)).clamp(max=1.0), math.nan)

    def _rank_sums(self, loss_sum: Tensor) -> list[Tensor | list[float]]:
        """Targets are counted where losses are made, in a pipeline by its last stage. Gradients are those of the whole
        model, encoders included, of which `passes.model` is the language model.
        """
        passes, language_model = self.passes, self.passes.model
        makes_loss = not isinstance(language_model, PipelineModel) or any(stage.last for stage in language_model.stages)
        targets = sum((batch.labels != NO_TARGET).sum() for batch in self.batches) if makes_loss else 0
        slot_sums = [loss_sum, [float(targets)], *(term.sums() for term in passes.terms)]
        if self.world.coordinates.tp:  # the tensor-parallel ranks of a slot have the same sums
            slot_sums = [[0.0] * _length(piece) for piece in slot_sums]
        return [model_square_sum(self.model, self.world) if passes.backward else [0.0], *slot_sums]

    def _make_sums(self, values: Sequence[float], pieces: Sequence[Tensor | list[float]]) -> StepSums:
        """Make the step's sums of `values`, the numbers of all `pieces` end to end, added over all ranks."""
        squares, loss_sum, targets, *of_terms = values
        if targets != self.passes.plan.targets:
            raise PlanError(
                f"the slots counted {targets:.0f} targets, the plan has {self.passes.plan.targets}; is a document left "
                "out?"
            )
        numbers = iter(of_terms)  # those of the pieces after squares, loss and targets
        return StepSums(loss_sum, math.sqrt(squares), [list(islice(numbers, _length(piece))) for piece in pieces[3:]])

    def _check_sums(self, sums: StepSums) -> None:
        """Raise NonFiniteError, on every rank, before an update with numbers that are not finite."""
        if self.optimizer is not None:
            check_finite(
                self.model,
                self.world,
                loss=sums.loss / self.passes.divisor,
                norm=sums.norm,
                nonfinite_inputs=lambda: [name for term in self.passes.terms for name in term.nonfinite_inputs()],
            )

    def _update(self, one_pass: OnePassAdamW | None, sums: StepSums) -> None:
        """AdamW in one pass clips as it updates: it multiplies each gradient that it reads with a factor."""
        if self.optimizer is None:
            return
        if one_pass is None:
            if self.max_grad_norm is not None:
                clip_gradients(self.model.parameters(), self.max_grad_norm, sums.norm)
            self.optimizer.step()
            return
        factor = 1.0 if self.max_grad_norm is None else self.max_grad_norm / (sums.norm + 1e-6)  # as torch clips
        if factor < 1:
            one_pass.gradient_scale = to_device(np.array(factor), self.world.device)
        try:
            self.optimizer.step()
        finally:
            one_pass.gradient_scale = None


def find_one_pass(optimizer: Optimizer | None) -> OnePassAdamW | None:
    """Return an optimizer if it is AdamW in one pass, also one whose moments wait on the host; None for others."""
    inner = optimizer.inner if isinstance(optimizer, OffloadedStates) else optimizer
    return inner if isinstance(inner, OnePassAdamW) else None


def sums_on_device(world: World) -> bool:
    """Return whether a step's sums stay on the device until the update is launched; a pipeline adds them on hosts."""
    return world.device.type == "cuda" and world.home.pp == 1


def gather_and_add(values: Tensor, world: World) -> Tensor:
    """Add values (n,) of all ranks of a home without pipeline, on the device: the same bits on every rank."""
    channels = world.channels
    if world.home.slots > 1:
        values = _gather(channels.find_channel(range(world.home.slots)), values)
    return _gather(channels.tp, values) if world.home.tp > 1 else values


def _gather(channel: Channel, values: Tensor) -> Tensor:
    """Gather the values (n,) of a channel's ranks and add them in the order of ranks: the same bits on every rank."""
    return torch.stack(channel.all_gather(values[None], [1] * channel.degree, SUMS_NAME).wait()).sum(0)[0]


class HostCopy:
    """A copy of a tensor on its way to the host: `wait` returns its numbers, and waits for nothing launched later."""

    def __init__(self, values: Tensor) -> None:
        """Begin to copy values from a GPU; those of a CPU are there already."""
        self._on_host, self._arrived = values, None
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


def _length(piece: Tensor | Sequence[float]) -> int:
    return piece.numel() if isinstance(piece, Tensor) else len(piece)


def _read_pieces(pieces: Sequence[Tensor | list[float]]) -> list[float]:
    return [x for piece in pieces for x in (piece.flatten().tolist() if isinstance(piece, Tensor) else piece)]


def _join_pieces(pieces: Sequence[Tensor | list[float]], device: torch.device) -> Tensor:
    on_device = [x if isinstance(x, Tensor) else to_device(np.array(x, dtype=np.float64), device) for x in pieces]
    return torch.cat([x.detach().double().flatten() for x in on_device])

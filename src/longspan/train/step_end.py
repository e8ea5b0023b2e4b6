"""The end of a step: gradient norm, sums over ranks, what is checked of them, and the update.

AdamW in one pass is launched before the host knows the norm: where it is not finite, the factor that clips is no number
and changes nothing. Other optimizers, CPUs and pipelines update once the host has checked the sums.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.comm import World, on_all_ranks, to_device
from longspan.comm.channel import Channel
from longspan.data.document import NO_TARGET
from longspan.errors import ModelError, NonFiniteError, PlanError
from longspan.model.marks import is_multimodal, is_pipeline, modules_and_worlds, norm_on_device
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import excerpt
from longspan.train.optim.offload_states import OffloadedStates
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.passes import Passes
from longspan.train.read_rows import LocalBatch


def grad_norm(model: nn.Module, world: World) -> float:
    """Return the 2-norm of all ranks' gradients together, the same on every rank, which all enter.

    >>> grad_norm(model, world)

    Every element of a gradient is counted once, on whatever meshes the parameters lie, in stages of a pipeline and in
    the homes of a MultimodalModel's encoders too. Parameters without a gradient are skipped: other ranks may have some.
    """
    squares = model_gradient_square_sum(model, world).item()
    (squares,) = world.control.sum_over_ranks([squares], "gradient norm")
    return math.sqrt(squares)


def clip_grad_norm(model: nn.Module, max_norm: float, world: World) -> float:
    """Scale gradients down, in place, to a 2-norm of `max_norm` over all ranks; return the norm that they had.

    >>> loss.backward()                                 # of the step's last micro-batch
    >>> norm = clip_grad_norm(model, 1.0, world)        # the norm before clipping, the same bits on every rank
    >>> optimizer.step()

    It takes the place of torch's `clip_grad_norm_` for a prepared model, whose gradients may be sharded over several
    meshes (tensor and expert parallelism, encoders) or be on other ranks altogether (pipeline stages). All ranks call
    it together. `max_norm` inf clips nothing.

    Raises ModelError for a `max_norm` that is not positive, NonFiniteError on every rank where the norm is not finite:
    no gradient has been scaled then, and the error names the parameters.
    """
    if not max_norm > 0:
        raise ModelError(
            f"max_norm is {max_norm}; give a positive norm, or float('inf') to measure and clip nothing"
        )
    norm = grad_norm(model, world)
    check_finite(model, world, norm=norm)
    clip_gradients(model.parameters(), max_norm, norm)
    return norm


@torch.no_grad()
def gradient_square_sum(parameters: Iterable[Tensor], world: World) -> Tensor:
    """Return this rank's part of the squared norm, on the device; gradients held alike in a stage count once."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    counts_here = _FirstCopies(world)
    parts = [
        torch.stack([norm.to(world.device) for norm in _norms(alike, dtype)]).double().square().sum()
        for dtype, alike in _group_by_dtype(gradient for gradient in gradients if counts_here(gradient)).items()
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=world.device)


def _norms(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Those of gradients on the host were taken while they were on the device."""
    norms = [norm_on_device(gradient) for gradient in gradients]
    here = [local_tensor(gradient) for gradient, norm in zip(gradients, norms, strict=True) if norm is None]
    others = iter(torch._foreach_norm(here, 2, dtype=_sum_dtype(dtype)) if here else ())
    return [next(others) if norm is None else norm for norm in norms]


def model_gradient_square_sum(model: nn.Module, world: World) -> Tensor:
    """Return this rank's part of the squared norm of a model and its encoders, which the device may still compute."""
    modules = modules_and_worlds(model, world) if is_multimodal(model) else [(model, world)]
    return torch.stack([gradient_square_sum(counted_parameters(module), home) for module, home in modules]).sum()


def counted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that this rank counts in the gradient norm: copies on several stages only on the first."""
    inside: Any = model.language_model if is_multimodal(model) else model
    skipped = inside.copies.parameters_counted_elsewhere if is_pipeline(inside) else ()
    return [parameter for parameter in model.parameters() if parameter not in skipped]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, norm: float) -> None:
    """Scale gradients, in place, by max_norm / norm where that is below 1; half precision is rounded once."""
    factor = max_norm / (norm + 1e-6)  # as torch's clip_grad_norm_
    if factor < 1:
        for dtype, gradients in _group_by_dtype(p.grad for p in parameters if p.grad is not None).items():
            # A tensor of its own type: a number would be rounded to the gradients' type (torch 2.13, CPU).
            torch._foreach_mul_([*map(local_tensor, gradients)], torch.tensor(factor, dtype=_sum_dtype(dtype)))


class _FirstCopies:
    """Whether this rank counts a gradient: the first of the ranks of its stage that hold the same elements."""

    def __init__(self, world: World) -> None:
        self._first_rank = world.home.rank_at(0, pp=world.coordinates.pp)
        self._rank = world.rank
        self._by_mesh = dict[Any, bool]()

    def __call__(self, gradient: Tensor) -> bool:
        if not isinstance(gradient, DTensor):
            return self._rank == self._first_rank
        key = gradient.device_mesh, gradient.placements
        if key not in self._by_mesh:
            self._by_mesh[key] = self._is_first_copy(*key)
        return self._by_mesh[key]

    def _is_first_copy(self, mesh: Any, placements: Any) -> bool:
        """Of the meshes of a stage only that with its first rank counts, and in it index 0 of axes with copies."""
        assert not any(placement.is_partial() for placement in placements), placements
        copies = [index for index, p in zip(mesh.get_coordinate(), placements, strict=True) if p.is_replicate()]
        return bool((mesh.mesh == self._first_rank).any()) and not any(copies)


def _group_by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    by_dtype = defaultdict[torch.dtype, list[Tensor]](list)
    for x in tensors:
        by_dtype[x.dtype].append(x)
    return by_dtype


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- what is not finite


_DTYPE = "compute in bfloat16 or float32 where it was in float16"


class _Report(NamedTuple):
    """Names of this rank's parameters, in the model's order, whose weights or gradients are not finite; the largest
    weight; and items for which it read something that is not finite."""

    weights: tuple[str, ...]
    gradients: tuple[str, ...]
    largest: float
    items: tuple[str, ...]


@torch.no_grad()
def check_finite(
    model: nn.Module,
    world: World,
    *,
    norm: float,
    loss: float | None = None,
    nonfinite_inputs: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Raise NonFiniteError, on every rank, with names of parameters, where the loss or the norm is not finite.

    `loss` is None in a caller's own loop; `nonfinite_inputs` names items for which this rank read something not finite.
    """
    if math.isfinite(norm) and (loss is None or math.isfinite(loss)):
        return
    # others are frozen weights as bytes
    weights = {name: local_tensor(p) for name, p in model.named_parameters() if p.is_floating_point()}
    gradients = {name: local_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    largest = max((x.abs().max().item() for x in weights.values() if x.numel()), default=0.0)
    report = _Report(_not_finite_names(weights), _not_finite_names(gradients), largest, tuple(nonfinite_inputs()))
    all_reports = world.control.gather_objects(report, "what is not finite")
    reports = dict(zip(world.home.ranks, all_reports, strict=True))
    numbers = f"the gradient norm is {norm}" if loss is None else f"the loss is {loss}, the gradient norm {norm}"
    error = NonFiniteError(
        f"step {world.step}: {numbers}; weights and optimizer are as before the step. {_remedy_text(reports, loss)}"
    )
    error.weights_are_finite = not any(report.weights for report in reports.values())
    raise on_all_ranks(error)


def _not_finite_names(tensors: dict[str, Tensor]) -> tuple[str, ...]:
    return tuple(name for name, x in tensors.items() if not x.isfinite().all())


def _remedy_text(reports: dict[int, _Report], loss: float | None) -> str:
    """Name the first of: weights before the step; items that were read; the loss; the sum of squares; gradients."""
    if weights := _parameters_text({rank: report.weights for rank, report in reports.items()}):
        return (
            f"Weights were not finite before this step: {weights}; go on from a checkpoint with weights that are, at a "
            "lower learning rate if training made them so"
        )
    if items := {name: None for report in reports.values() for name in report.items}:
        more = f" and {len(items) - 3} more" if len(items) > 3 else ""
        return (
            f"Weights are finite, what was read for {', '.join([*items][:3])}{more} is not: mend it or leave it out"
        )
    gradients = _parameters_text({rank: report.gradients for rank, report in reports.items()})
    too_large = (
        f"the largest weight is {max(report.largest for report in reports.values()):.3g}: where training made it that "
        "large, lower the learning rate or raise the warm-up"
    )
    if loss is not None and not math.isfinite(loss):
        return (
            f"Weights are finite, and a forward pass overflowed; {too_large}; otherwise look at the documents, and "
            f"{_DTYPE}"
        )
    if not gradients:
        return f"Every gradient is finite, and the sum of their squares overflowed in float32; {too_large}"
    finite_text = "Weights are finite" if loss is None else "The loss is finite"
    return (
        f"{finite_text}, and a backward pass overflowed: {gradients}; {too_large}; otherwise look at what comes "
        f"after that parameter (a division, root, logarithm or mask without a derivative at 0), and {_DTYPE}"
    )


def _parameters_text(names: dict[int, tuple[str, ...]]) -> str:
    ranks = [rank for rank, rank_names in names.items() if rank_names]
    if not ranks:
        return ""
    last = names[ranks[-1]]
    return f"ranks {excerpt(ranks)}, on rank {ranks[-1]} {len(last)} parameters up to {last[-1]}"


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
    host_work: Callable[[], None]  # the host's work for the next step, before it waits for the device

    @property
    def world(self) -> World:
        return self.passes.world

    def finish_step(self, loss_sum: Tensor) -> StepSums:
        """Sum this rank's loss and gradients over all ranks, check them, and update the model if there is an optimizer.

        Raises PlanError where targets are missing, NonFiniteError where the loss or the norm is not finite, on every
        rank: weights and the optimizer's state are as before the step.
        """
        pieces = self._pieces_to_sum(loss_sum)
        inner = self.optimizer.inner if isinstance(self.optimizer, OffloadedStates) else self.optimizer
        one_pass = inner if isinstance(inner, OnePassAdamW) else None
        if one_pass is not None and sums_on_device(self.world):
            return self._finish_on_device(one_pass, pieces)
        self.host_work()
        values = [x for piece in pieces for x in piece.tolist()]
        sums = self._check_sums(self.world.control.sum_over_ranks(values, SUMS_NAME), pieces)
        self._update_weights(one_pass, sums)
        return sums

    def _finish_on_device(self, one_pass: OnePassAdamW, pieces: Sequence[Tensor]) -> StepSums:
        """An update that goes on behind the next forward pass begins once the host has checked the sums."""
        assert self.optimizer is not None
        device = self.world.device
        on_device = [x if x.device == device else to_device(x.numpy(), device) for x in pieces]
        values = gather_and_add(torch.cat(on_device), self.world)
        copy = HostCopy(values)
        with _scaled_gradients(one_pass, self._clip_factor(values)):
            if isinstance(self.optimizer, OffloadedStates) and self.optimizer.hides_updates:
                self.host_work()
                sums = self._check_sums(copy.wait(), pieces)
                self.optimizer.step()
                return sums
            self.optimizer.step()
        self.host_work()
        try:
            return self._check_sums(copy.wait(), pieces)
        except BaseException:
            one_pass.take_back_counts(self.optimizer.state)  # its scale was no number: nothing else has changed
            raise

    def _clip_factor(self, values: Tensor) -> Tensor:
        """The factor (at most 1) of gradients on the device; no number where the step must not be taken."""
        norm = values[0].sqrt()
        loss = values[1] / self.passes.divisor
        targets = values[2]
        is_good = norm.isfinite() & loss.isfinite() & (targets == self.passes.plan.targets)
        norm_limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return torch.where(is_good, (norm_limit / (norm + 1e-6)).clamp(max=1.0), math.nan)

    def _pieces_to_sum(self, loss_sum: Tensor) -> list[Tensor]:
        """Numbers (n,) in float64: squares of gradients, loss, targets, and those of each term.

        Targets are counted where losses are made, in a pipeline by its last stage. Gradients are those of the whole
        model, encoders included, of which `passes.model` is the language model.
        """
        passes = self.passes
        language_model: Any = passes.model
        makes_loss = not is_pipeline(language_model) or any(stage.last for stage in language_model.stages)
        targets = sum(int((batch.labels != NO_TARGET).sum()) for batch in self.batches) if makes_loss else 0
        numbers = [loss_sum, [targets], *(term.sums() for term in passes.terms)]
        slot_sums = [torch.as_tensor(x, dtype=torch.float64).detach().flatten() for x in numbers]
        if self.world.coordinates.tp:  # the tensor-parallel ranks of a slot have the same sums
            slot_sums = [torch.zeros(len(x), dtype=torch.float64) for x in slot_sums]
        squares = torch.zeros(1, dtype=torch.float64)
        if passes.backward:
            squares = model_gradient_square_sum(self.model, self.world).flatten()
        return [squares, *slot_sums]

    def _check_sums(self, values: Sequence[float], pieces: Sequence[Tensor]) -> StepSums:
        squares, loss_sum, targets, *of_terms = values
        if targets != self.passes.plan.targets:
            raise PlanError(
                f"the slots counted {targets:.0f} targets, the plan has {self.passes.plan.targets}; is a document left "
                "out?"
            )
        numbers = iter(of_terms)  # those of the pieces after squares, loss and targets
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

    def _update_weights(self, one_pass: OnePassAdamW | None, sums: StepSums) -> None:
        if self.optimizer is None:
            return
        if one_pass is None:
            if self.max_grad_norm is not None:
                clip_gradients(self.model.parameters(), self.max_grad_norm, sums.norm)
            self.optimizer.step()
            return
        factor = 1.0 if self.max_grad_norm is None else self.max_grad_norm / (sums.norm + 1e-6)  # as torch clips
        scale = to_device(np.array(factor), self.world.device) if factor < 1 else None
        with _scaled_gradients(one_pass, scale):
            self.optimizer.step()


@contextmanager
def _scaled_gradients(optimizer: OnePassAdamW, scale: Tensor | None) -> Iterator[None]:
    """Have updates inside multiply gradients by a scale on the device."""
    optimizer.gradient_scale = scale
    try:
        yield
    finally:
        optimizer.gradient_scale = None


def sums_on_device(world: World) -> bool:
    """Return whether a step's sums stay on the device until the update is launched; a pipeline adds them on hosts."""
    return world.device.type == "cuda" and world.home.pp == 1


def gather_and_add(values: Tensor, world: World) -> Tensor:
    """Add values (n,) of all ranks of a home without pipeline, on the device: the same bits on every rank."""
    channels = world.channels
    if world.home.slots > 1:
        values = _gather_and_sum(channels.find_channel(range(world.home.slots)), values)
    return _gather_and_sum(channels.tp, values) if world.home.tp > 1 else values


def _gather_and_sum(channel: Channel, values: Tensor) -> Tensor:
    """Gather the values (n,) of a channel's ranks and add them in the order of ranks: the same bits on every rank."""
    return torch.stack(channel.all_gather(values[None], [1] * channel.degree, SUMS_NAME).wait()).sum(0)[0]


class HostCopy:
    """A copy of a tensor on its way to the host: `wait` returns its numbers, and waits for nothing launched later."""

    def __init__(self, values: Tensor) -> None:
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

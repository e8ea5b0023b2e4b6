"""Gradients of a step before its update: their norm over all ranks, whether they are finite, and clipping.

The norm is one number with the same bits on every rank: squares are summed in float32 (float64 for float64 gradients)
parameter by parameter, over parameters and ranks in float64. Making gradients is the business of `step.py`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm import World, on_all_ranks
from longspan.errors import ModelError, NonFiniteError
from longspan.layout.layout import excerpt
from longspan.model.multimodal.multimodal_model import MultimodalModel, modules_and_worlds
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.weights.local_tensors import local_tensor


def grad_norm(model: nn.Module, world: World) -> float:
    """Return the 2-norm of all ranks' gradients together, the same on every rank, which all enter.

    >>> grad_norm(model, world)

    Every element of a gradient is counted once, on whatever meshes the parameters lie, in stages of a pipeline and in
    the homes of a MultimodalModel's encoders too. Parameters without a gradient are skipped: other ranks may have some.
    """
    squares = model_square_sum(model, world).item()
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
        raise ModelError(f"max_norm is {max_norm}; give a positive norm, or float('inf') to measure and clip nothing")
    norm = grad_norm(model, world)
    check_finite(model, world, norm=norm)
    clip_gradients(model.parameters(), max_norm, norm)
    return norm


@torch.no_grad()
def square_sum(parameters: Iterable[Tensor], world: World) -> Tensor:
    """Return this rank's part of the squared norm, on the device; the sum of all ranks' parts is the squared norm.

    A gradient that several ranks of a pipeline stage hold alike is counted by one of these ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    counts_here = _FirstCopies(world)
    parts = [
        torch.stack(torch._foreach_norm(tensors, 2, dtype=_sum_dtype(dtype))).double().square().sum()
        for dtype, tensors in _group_by_dtype(gradient for gradient in gradients if counts_here(gradient)).items()
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=world.device)


def model_square_sum(model: nn.Module, world: World) -> Tensor:
    """Return this rank's part of the squared norm of a model's gradients, on the device, which may still compute it.

    Modules of the model may have homes of their own, as encoders have.
    """
    modules = modules_and_worlds(model, world) if isinstance(model, MultimodalModel) else [(model, world)]
    return torch.stack([square_sum(counted_parameters(module), home) for module, home in modules]).sum()


def counted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that this rank counts in the gradient norm: copies on several stages only on the first."""
    inside = model.language_model if isinstance(model, MultimodalModel) else model
    skipped = inside.copies.parameters_counted_elsewhere if isinstance(inside, PipelineModel) else ()
    return [parameter for parameter in model.parameters() if parameter not in skipped]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, norm: float) -> None:
    """Scale all gradients, in place, by max_norm / norm where their `norm` exceeds `max_norm`; never communicates.

    Gradients in half precision are multiplied in float32 and rounded once.
    """
    factor = max_norm / (norm + 1e-6)  # as torch's clip_grad_norm_
    if factor < 1:
        for dtype, tensors in _group_by_dtype(p.grad for p in parameters if p.grad is not None).items():
            # A tensor of its own type: a number would be rounded to the gradients' type (torch 2.13, CPU).
            torch._foreach_mul_(tensors, torch.tensor(factor, dtype=_sum_dtype(dtype)))


class _FirstCopies:
    """Whether this rank counts a gradient: the first of the ranks of its stage that hold the same elements."""

    def __init__(self, world: World) -> None:
        """Remember the answer by mesh and placements, which many gradients share."""
        self._first_rank, self._rank = world.home.rank_at(0, pp=world.coordinates.pp), world.rank
        self._by_mesh = dict[Any, bool]()

    def __call__(self, gradient: Tensor) -> bool:
        """Return whether this rank counts a gradient; a plain tensor is the same on all ranks of the stage."""
        if not isinstance(gradient, DTensor):
            return self._rank == self._first_rank
        key = gradient.device_mesh, gradient.placements
        if key not in self._by_mesh:
            self._by_mesh[key] = self._is_first_copy(*key)
        return self._by_mesh[key]

    def _is_first_copy(self, mesh: Any, placements: Any) -> bool:
        """Return whether this rank has the first copy of gradients with this mesh and these placements.

        Several meshes of a stage may hold the same gradients, one mesh for each index of the axes that they lack: only
        the one with the stage's first rank counts, and in it a rank at index 0 of every axis that has copies.
        """
        assert not any(placement.is_partial() for placement in placements), placements
        copies = [index for index, p in zip(mesh.get_coordinate(), placements, strict=True) if p.is_replicate()]
        return bool((mesh.mesh == self._first_rank).any()) and not any(copies)


def _group_by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    by_dtype = defaultdict[torch.dtype, list[Tensor]](list)
    for x in tensors:
        by_dtype[x.dtype].append(local_tensor(x))
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


def check_finite(
    model: nn.Module,
    world: World,
    *,
    norm: float,
    loss: float | None = None,
    nonfinite_inputs: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Raise NonFiniteError, on every rank, where the loss or the gradient norm, equal on all ranks, is not finite.

    Only then the ranks look for parameters that are not finite, and gather their names. `loss` is None where the
    caller's own loop made it; `nonfinite_inputs` names items for which this rank read something that is not finite.
    """
    if math.isfinite(norm) and (loss is None or math.isfinite(loss)):
        return
    reports = dict(
        zip(
            world.home.ranks,
            world.control.gather_objects(_report_not_finite(model, nonfinite_inputs()), "what is not finite"),
            strict=True,
        )
    )
    numbers = f"the gradient norm is {norm}" if loss is None else f"the loss is {loss}, the gradient norm {norm}"
    error = NonFiniteError(
        f"step {world.step}: {numbers}; weights and optimizer are as before the step. {_remedy_text(reports, loss)}"
    )
    error.weights_are_finite = not any(report.weights for report in reports.values())
    raise on_all_ranks(error)


@torch.no_grad()
def _report_not_finite(model: nn.Module, items: Sequence[str]) -> _Report:
    """Report which weights and gradients of this rank are not finite, and its largest weight.

    `items` are names of images and the like for which this rank read something that is not finite.
    """
    weights = {name: local_tensor(p) for name, p in model.named_parameters()}
    gradients = {name: local_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    largest = max((x.abs().max().item() for x in weights.values() if x.numel()), default=0.0)
    return _Report(_not_finite_names(weights), _not_finite_names(gradients), largest, tuple(items))


def _not_finite_names(tensors: dict[str, Tensor]) -> tuple[str, ...]:
    return tuple(name for name, x in tensors.items() if not x.isfinite().all())


def _remedy_text(reports: dict[int, _Report], loss: float | None) -> str:
    """Write what is not finite, and what to do about it.

    The first of these cases is named: weights before the step; what was read of items, such as pixels; the loss,
    although weights are finite; no gradient, so that only the sum of squares overflowed; gradients. A loss of None is
    not known.
    """
    if weights := _place_text({rank: report.weights for rank, report in reports.items()}):
        return (
            f"Weights were not finite before this step: {weights}; go on from a checkpoint with weights that are, at a "
            "lower learning rate if training made them so"
        )
    if items := {name: None for report in reports.values() for name in report.items}:
        more = f" and {len(items) - 3} more" if len(items) > 3 else ""
        return f"Weights are finite, what was read for {', '.join([*items][:3])}{more} is not: mend it or leave it out"
    gradients = _place_text({rank: report.gradients for rank, report in reports.items()})
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


def _place_text(names: dict[int, tuple[str, ...]]) -> str:
    """Name the ranks that have names, and the last parameter of the last one, which a backward pass reaches first."""
    ranks = [rank for rank, rank_names in names.items() if rank_names]
    if not ranks:
        return ""
    last = names[ranks[-1]]
    return f"ranks {excerpt(ranks)}, on rank {ranks[-1]} {len(last)} parameters up to {last[-1]}"

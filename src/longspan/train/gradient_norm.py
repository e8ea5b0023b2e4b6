"""The norm of all ranks' gradients together, and clipping by it, over whatever meshes the parameters lie."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.marks import is_multimodal, is_pipeline, modules_and_worlds, norm_on_device
from longspan.model.weights.local_tensors import local_tensor
from longspan.train.nonfinite import check_finite


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
    scale_to_norm(model.parameters(), max_norm, norm)
    return norm


@torch.no_grad()
def gradient_square_sum(parameters: Iterable[Tensor], world: World, *, as_reduced: bool = False) -> Tensor:
    """Return this rank's part of the sum of squares of gradients, a float64 scalar that the device may still compute.

    A gradient that several ranks of a stage hold alike counts on the first of them alone. With `as_reduced`, while no
    code of a user has had the gradients, one that waits on the host brings the norm that was taken while it was on the
    device. Otherwise norms are computed from local shards: what is written through `.data` changes no version.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    counts_here = _FirstCopies(world)
    parts = list[Tensor]()
    for dtype, alike in _group_by_dtype(gradient for gradient in gradients if counts_here(gradient)).items():
        known_norms = [norm_on_device(gradient) if as_reduced else None for gradient in alike]
        shards = [local_tensor(gradient) for gradient, norm in zip(alike, known_norms, strict=True) if norm is None]
        # torch's clip_grad_norm_ uses this private function: one launch for many tensors.
        shard_norms = (
            torch._foreach_norm(shards, 2, dtype=torch.promote_types(dtype, torch.float32)) if shards else ()
        )
        remaining_norms = iter(shard_norms)
        norms = [next(remaining_norms) if norm is None else norm for norm in known_norms]
        parts.append(torch.stack([norm.to(world.device) for norm in norms]).double().square().sum())
    if parts:
        return torch.stack(parts).sum()
    return torch.zeros((), dtype=torch.float64, device=world.device)


def model_gradient_square_sum(model: nn.Module, world: World, *, as_reduced: bool = False) -> Tensor:
    """Return `gradient_square_sum` of a model and its encoders."""
    modules = modules_and_worlds(model, world) if is_multimodal(model) else [(model, world)]
    sums = [
        gradient_square_sum(counted_parameters(module), home, as_reduced=as_reduced) for module, home in modules
    ]
    return torch.stack(sums).sum()


def counted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that this rank counts in the gradient norm: copies on several stages only on the first."""
    inside: Any = model.language_model if is_multimodal(model) else model
    skipped = inside.copies.parameters_counted_elsewhere if is_pipeline(inside) else ()
    return [parameter for parameter in model.parameters() if parameter not in skipped]


@torch.no_grad()
def scale_to_norm(parameters: Iterable[Tensor], max_norm: float, norm: float) -> None:
    """Scale gradients, in place, by max_norm / norm where that is below 1; half precision is rounded once.

    `norm` is that of all ranks' gradients. No collective is entered.
    """
    # The factor is that of torch's clip_grad_norm_.
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        for dtype, gradients in _group_by_dtype(p.grad for p in parameters if p.grad is not None).items():
            # A tensor of its own type: a number would be rounded to the gradients' type (torch 2.13, CPU).
            torch._foreach_mul_(
                [*map(local_tensor, gradients)],
                torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32)),
            )


class _FirstCopies:
    """A predicate: whether this rank counts a gradient, as the first of the ranks of its stage that hold the same
    elements.
    """

    def __init__(self, world: World) -> None:
        self._first_rank = world.home.rank_at(0, pp=world.coordinates.pp)
        self._rank = world.rank
        self._by_mesh = dict[Any, bool]()

    def __call__(self, gradient: Tensor) -> bool:
        """Return whether this rank counts the gradient; the answer for a mesh and placements is kept.

        A stage may have several meshes: only the one with the stage's first rank counts. Along an axis of that mesh
        whose ranks hold copies, only the rank of index 0 counts.
        """
        if not isinstance(gradient, DTensor):
            return self._rank == self._first_rank
        key = gradient.device_mesh, gradient.placements
        if key not in self._by_mesh:
            mesh: Any
            mesh, placements = key
            assert not any(placement.is_partial() for placement in placements), placements
            copy_numbers = [
                index for index, p in zip(mesh.get_coordinate(), placements, strict=True) if p.is_replicate()
            ]
            self._by_mesh[key] = bool((mesh.mesh == self._first_rank).any()) and not any(copy_numbers)
        return self._by_mesh[key]


def _group_by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    by_dtype = defaultdict[torch.dtype, list[Tensor]](list)
    for x in tensors:
        by_dtype[x.dtype].append(x)
    return by_dtype

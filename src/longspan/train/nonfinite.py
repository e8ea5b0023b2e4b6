"""The error of a step whose loss or gradient norm is not finite: which parameters, on which ranks, and what to do."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.comm import World, on_all_ranks
from longspan.errors import NonFiniteError
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import excerpt

_DTYPE = "compute in bfloat16 or float32 where it was in float16"


class _Report(NamedTuple):
    """What one rank found: names of its parameters, in the model's order, whose weights or gradients are not finite;
    the largest weight; and items, such as images, for which it read something that is not finite.
    """

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

    All ranks call it before the update, with the same `norm` and `loss`: where one is not finite they gather what each
    has, and a rank that saw other numbers would keep the rest waiting. `loss` is None in a caller's own loop;
    `nonfinite_inputs` names items for which this rank read something not finite. The error's `weights_are_finite`
    says whether the weights of all ranks are finite.
    """
    if math.isfinite(norm) and (loss is None or math.isfinite(loss)):
        return
    # Parameters of other types are frozen weights, packed into bytes.
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
    """Waits for the device."""
    return tuple(name for name, x in tensors.items() if not x.isfinite().all())


def _remedy_text(reports: dict[int, _Report], loss: float | None) -> str:
    """The text names the first cause that applies: weights that were not finite before the step, items that were
    read, a forward pass (its loss), the sum of squares of finite gradients, a backward pass (its gradients). Loss
    None: not known."""
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
    """The last such rank's last parameter is the first that a backward pass reaches."""
    ranks = [rank for rank, rank_names in names.items() if rank_names]
    if not ranks:
        return ""
    last = names[ranks[-1]]
    return f"ranks {excerpt(ranks)}, on rank {ranks[-1]} {len(last)} parameters up to {last[-1]}"

"""A loss of whole documents: a function of the log-probabilities that a model gives to each document of a set."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.errors import LossError, shortened
from longspan.plan import Plan

SetFunction = Callable[[Tensor, tuple[int, ...]], Tensor]
Sums = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DocumentLoss:
    """A loss of sets of documents, as `loss=` of `run_step`: pairs of DPO, or groups of one prompt's answers.

    >>> def dpo(sums, documents):                       # of one pair: the preferred answer and the other one
    ...     chosen, rejected = sums - reference[list(documents)]
    ...     return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
    >>> run_step(model, plan, documents, world, optimizer, loss=DocumentLoss(dpo, sets=[(0, 1), (2, 3)]))

    `function(sums, documents)` gets the numbers of a set's documents and, in their order, the sum of the
    log-probabilities of each one's targets, times their weights: float64 on the host. It returns a scalar, and must be
    the same on every rank. The step's loss is the sum over `sets` (None: one set of all documents) divided by
    `divisor=`, by default the number of sets.
    """

    function: SetFunction
    sets: Sequence[Sequence[int]] | None = None

    def sets_of(self, plan: Plan) -> tuple[tuple[int, ...], ...]:
        """The sets, checked against a plan. Raises LossError for documents that it has not, and for empty sets."""
        count = len(plan.lengths)
        if not callable(self.function):
            raise LossError(
                f"the function of a DocumentLoss is {shortened(self.function)}; give a function of (sums, documents)"
            )
        if self.sets is None:
            return (tuple(range(count)),) if count else ()
        sets = tuple(_numbers(index, documents) for index, documents in enumerate(_listed(self.sets)))
        for index, documents in enumerate(sets):
            if not documents or len(set(documents)) != len(documents):
                raise LossError(
                    f"set {index} of a DocumentLoss is {shortened(documents)}; give each document of a set once"
                )
            if min(documents) < 0 or max(documents) >= count:
                raise LossError(
                    f"set {index} of a DocumentLoss is {shortened(documents)}, the plan has documents 0 to "
                    f"{count - 1}; give their numbers in the plan"
                )
        return sets


def _listed(sets: Any) -> list[Any]:
    try:
        return list(sets)
    except TypeError as error:
        raise LossError(
            f"the sets of a DocumentLoss are {shortened(sets)}; give a list of sets: [(0, 1), (2, 3)]"
        ) from error


def _numbers(index: int, documents: Any) -> tuple[int, ...]:
    """The numbers of a set's documents. Raises LossError for what is no integer."""
    try:
        if any(isinstance(document, bool) for document in documents):
            raise TypeError("a bool is no number of a document")
        return tuple(operator.index(document) for document in documents)
    except TypeError as error:
        raise LossError(
            f"set {index} of a DocumentLoss is {shortened(documents)}; give the numbers of its documents, as integers: "
            "sets=[(0, 1), (2, 3)]"
        ) from error


def loss_of_sets(function: SetFunction, sets: Sequence[tuple[int, ...]], sums: Sums) -> tuple[float, Sums]:
    """The sum of the losses of some sets, and its derivative by the sum of each of all documents (D,).

    Raises LossError where the function gives no scalar.
    """
    total, coefficients = 0.0, np.zeros(len(sums))
    for documents in sets:
        leaf = torch.from_numpy(sums[list(documents)]).requires_grad_()
        with torch.enable_grad():
            loss = _checked(function(leaf, documents), documents)
        total += loss.item()
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
            if gradient is not None:
                np.add.at(coefficients, list(documents), gradient.numpy())
    return total, coefficients


def _checked(loss: Any, documents: tuple[int, ...]) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.sum()
    shape = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"the function of a DocumentLoss gave {shape} for documents {documents}; return a floating-point tensor of one "
        "number"
    )

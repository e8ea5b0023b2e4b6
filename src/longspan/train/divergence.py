"""The divergence of a student's distributions from a teacher's, of rows of logits, and its gradient at the student's.

The divergence is TRL's `generalized_jsd_loss`. Plain torch; wide copies are of one part of the rows at a time.
"""

from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.errors import LossError
from longspan.plain_text import short_text
from longspan.train.log_probs import cut_into_chunks

# Of a chunk's rows longspan makes wide copies of one part at a time.
_ROW_PARTS = 8


class RowDivergences(NamedTuple):
    """Of rows (t,) the divergence, the student's entropy in nats, and the share of the teacher's distribution that is
    compared token by token; and the gradient (t, V) of the divergences at the student's logits, None without one.

    The entropy is at the divergence's temperature, over the columns that both models have.
    """

    losses: Tensor
    entropies: Tensor
    teacher_mass: Tensor
    gradient: Tensor | None


@dataclass(frozen=True)
class Divergence:
    """Which divergence of student p and teacher q: the generalized Jensen-Shannon divergence of TRL.

    `beta` 0: KL(q‖p); 1: KL(p‖q); between: β KL(q‖m) + (1 − β) KL(p‖m), m = (1 − β) p + β q. `temperature` divides
    both models' logits, and nothing else. `top_k` > 0 compares the teacher's k likeliest tokens alone: all others are
    one more token (`add_tail`), or both distributions are renormalised. Raises LossError for other values.
    """

    beta: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    add_tail: bool = True

    def __post_init__(self) -> None:
        if not _is_number(self.beta) or not 0 <= self.beta <= 1:
            raise LossError(
                f"beta is {short_text(self.beta)}; give a number from 0, the teacher's KL, to 1, the student's"
            )
        if not _is_number(self.temperature) or not 0 < self.temperature < float("inf"):
            raise LossError(f"temperature is {short_text(self.temperature)}; give a number above 0")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise LossError(
                f"top_k is {short_text(self.top_k)}; give how many of the teacher's likeliest tokens are compared, or "
                "0 for all"
            )
        if not isinstance(self.add_tail, bool):
            raise LossError(f"add_tail is {short_text(self.add_tail)}; give True or False")

    @torch.no_grad()
    def compare_rows(self, student: Tensor, teacher: Tensor, *, gradient: bool) -> RowDivergences:
        """Compute divergences of logits (t, V) and (t, V'), over the first min(V, V') columns of both.

        Softmaxes are in float32, in float64 for float64 logits. The gradient has the student's dtype and columns.
        """
        student = student.detach()
        columns = min(student.shape[1], teacher.shape[1])
        dtype = torch.promote_types(student.dtype, torch.float32)
        losses, entropies, mass = student.new_empty((3, len(student)), dtype=dtype).unbind()
        logit_gradient = torch.zeros_like(student) if gradient else None
        for part in cut_into_chunks(len(student), max(1, len(student) // _ROW_PARTS)):
            log_p = (student[part, :columns].to(dtype) / self.temperature).log_softmax(-1)
            log_q = (teacher[part, :columns].to(dtype) / self.temperature).log_softmax(-1)
            entropies[part] = -_expectation(log_p, log_p)
            losses[part], mass[part], slopes = self._compare_log_probs(log_p, log_q)
            if logit_gradient is None:
                continue
            # Slopes are by log p before it is normalised; the softmax takes their sum off each row.
            slopes -= log_p.exp() * slopes.sum(-1, keepdim=True)
            logit_gradient[part, :columns] = (slopes / self.temperature).to(student.dtype)
        return RowDivergences(losses, entropies, mass, logit_gradient)

    def _compare_log_probs(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses (t,), the teacher's mass (t,), and the derivatives (t, V) of losses by log p."""
        if not 0 < self.top_k < log_p.shape[1]:
            losses, slopes = self._whole(log_p, log_q)
            return losses, torch.ones_like(losses), slopes
        likeliest_q, ids = log_q.topk(self.top_k, dim=-1)  # (t, k)
        likeliest_p = log_p.gather(1, ids)
        mass = likeliest_q.exp().sum(-1)
        if not self.add_tail:
            # The derivatives of renormalised log-probabilities sum to what the normalisation takes off again.
            log_p_k = likeliest_p.log_softmax(-1)
            losses, slopes_k = self._whole(log_p_k, likeliest_q.log_softmax(-1))
            slopes_k = slopes_k - log_p_k.exp() * slopes_k.sum(-1, keepdim=True)
            return losses, mass, torch.zeros_like(log_p).scatter_(1, ids, slopes_k)
        # The rest is summed from the other columns, never by subtraction from 1.
        others_p = log_p.scatter(1, ids, -torch.inf)
        rest_p = others_p.logsumexp(-1, keepdim=True)
        rest_q = log_q.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        losses, slopes_k = self._whole(torch.cat([likeliest_p, rest_p], 1), torch.cat([likeliest_q, rest_q], 1))
        # A rest that cannot come has no derivative.
        shares = (others_p - rest_p.clamp(min=torch.finfo(rest_p.dtype).min)).exp()
        slopes = shares.mul_(slopes_k[:, -1:]).scatter_(1, ids, slopes_k[:, :-1])
        return losses, mass, slopes

    def _whole(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (t,) of distributions (t, n), and their derivatives (t, n) by log p, up to a multiple of p in each
        row, which the softmax takes off."""
        if self.beta == 0:
            return _expectation(log_q, log_q) - _expectation(log_q, log_p), -log_q.exp()
        if self.beta == 1:
            terms = _products(log_p, log_p - log_q)
            return terms.sum(-1), terms
        student, teacher = log_p.new_tensor(1 - self.beta).log(), log_p.new_tensor(self.beta).log()
        log_m = torch.logaddexp(log_p + student, log_q + teacher)
        terms = _products(log_p, log_p - log_m)
        losses = self.beta * _products(log_q, log_q - log_m).sum(-1) + (1 - self.beta) * terms.sum(-1)
        return losses, (1 - self.beta) * terms


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _products(log_weights: Tensor, values: Tensor) -> Tensor:
    """Probabilities times values, 0 where a token cannot come."""
    weights = log_weights.exp()
    return torch.where(weights == 0, 0.0, weights * values)


def _expectation(log_weights: Tensor, values: Tensor) -> Tensor:
    return _products(log_weights, values).sum(-1)

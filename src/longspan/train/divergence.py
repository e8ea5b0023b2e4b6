"""The divergence of a student's distributions from a teacher's, of rows of logits, and its gradient at the student's.

The divergence is TRL's `generalized_jsd_loss`. It is in Triton's kernels on GPUs, else in plain torch, which makes wide
copies of one part of the rows at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.errors import LossError
from longspan.lazy import import_triton_kernels
from longspan.plain_text import short_text
from longspan.train.log_probs import KERNELS, cut_into_chunks, uses_softmax_kernels

# Of a chunk's rows longspan makes wide copies of one part at a time.
_ROW_PARTS = 8
# A program of the kernels keeps six numbers for each of these columns.
_COLUMNS = 2048
_WARPS = 8


class RowDivergences(NamedTuple):
    """Of rows (t,) the divergence, the student's entropy in nats, and the share of the teacher's distribution that is
    compared token by token; and the gradient (t, V) of weighted divergences at the student's logits, None without one.

    The entropy is at the divergence's temperature, over the columns that both models have.
    """

    losses: Tensor
    entropies: Tensor
    teacher_mass: Tensor
    gradient: Tensor | None


class LikeliestRows(NamedTuple):
    """Of rows (t,) a teacher's k likeliest tokens: ids (t, k), log-probabilities (t, k), and the log of the sum of the
    probabilities of all other tokens (t,).
    """

    ids: Tensor
    log_probs: Tensor
    rests: Tensor


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
    def compare_rows(self, student: Tensor, teacher: Tensor, weights: Tensor | None = None) -> RowDivergences:
        """Compute divergences of logits (t, V) and (t, V'), over the first min(V, V') columns of both.

        With `weights` (t,) there is a gradient: of each row's divergence times its weight, in the student's dtype and
        columns. Softmaxes are in float32, in float64 for float64 logits. The teacher's logits may be overwritten.
        """
        student = student.detach()
        columns = min(student.shape[1], teacher.shape[1])
        if 0 < self.top_k < columns:
            return self.compare_likeliest(student, self.find_likeliest(teacher[:, :columns]), columns, weights)
        if _uses_kernels(student) and _uses_kernels(teacher):
            return self._compare_by_kernel(student, teacher, columns, weights)
        dtype = torch.promote_types(student.dtype, torch.float32)
        losses, entropies = student.new_empty((2, len(student)), dtype=dtype).unbind()
        gradient = None if weights is None else torch.zeros_like(student)
        for part in _row_parts(student):
            log_p = (student[part, :columns].to(dtype) / self.temperature).log_softmax(-1)
            log_q = (teacher[part, :columns].to(dtype) / self.temperature).log_softmax(-1)
            entropies[part] = -_expectation(log_p, log_p)
            losses[part], slopes = self._whole(log_p, log_q)
            if gradient is None or weights is None:
                continue
            # Slopes are by log p before it is normalised; the softmax takes their sum off each row.
            slopes -= log_p.exp() * slopes.sum(-1, keepdim=True)
            gradient[part, :columns] = (slopes * _column(weights[part] / self.temperature)).to(student.dtype)
        return RowDivergences(losses, entropies, torch.ones_like(losses), gradient)

    def _compare_by_kernel(
        self, student: Tensor, teacher: Tensor, columns: int, weights: Tensor | None
    ) -> RowDivergences:
        rows = len(student)
        losses, entropies = student.new_empty((2, rows), dtype=torch.float32).unbind()
        gradient = None
        if weights is not None:
            same_form = (teacher.shape, teacher.dtype) == (student.shape, student.dtype)
            gradient = teacher if same_form and teacher.is_contiguous() else torch.empty_like(student)
        if rows:
            kind = int(self.beta) if self.beta in (0, 1) else 2
            strides = (student.stride(0), teacher.stride(0), 0 if gradient is None else gradient.stride(0))
            numbers = (columns, student.shape[1], *strides, float(self.beta), 1 / self.temperature)
            import_triton_kernels(KERNELS).divergence_kernel[(rows,)](
                student,
                teacher,
                losses if weights is None else weights.to(torch.float32).contiguous(),
                losses,
                entropies,
                losses if gradient is None else gradient,
                *numbers,
                KIND=kind,
                GRADIENT=gradient is not None,
                COLUMNS=_COLUMNS,
                num_warps=_WARPS,
            )
        return RowDivergences(losses, entropies, torch.ones_like(losses), gradient)

    @torch.no_grad()
    def find_likeliest(self, logits: Tensor) -> LikeliestRows:
        """Return the `top_k` likeliest tokens of logits (t, V), which are overwritten."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        likeliest, ids = logits.topk(self.top_k, dim=-1)
        likeliest = likeliest.to(dtype) / self.temperature
        # The rest is summed from the other columns, never by subtraction from 1.
        log_rests, _ = _softmax_statistics(logits.scatter_(1, ids, -torch.inf), self.temperature)
        log_totals = torch.logaddexp(likeliest.logsumexp(-1), log_rests)
        return LikeliestRows(ids, likeliest - _column(log_totals), log_rests - log_totals)

    @torch.no_grad()
    def compare_likeliest(
        self, student: Tensor, likeliest: LikeliestRows, columns: int, weights: Tensor | None = None
    ) -> RowDivergences:
        """Compute divergences of logits (t, V) from a teacher's likeliest tokens, over the first `columns` columns, as
        `compare_rows` does with `top_k`. The logits are changed, and restored.
        """
        student = student.detach()
        dtype = torch.promote_types(student.dtype, torch.float32)
        ids, log_q, log_rest_q = likeliest.ids, likeliest.log_probs.to(dtype), likeliest.rests.to(dtype)
        saved, saved_behind = student.gather(1, ids), student[:, columns:].clone()
        student[:, columns:] = -torch.inf
        student.scatter_(1, ids, -torch.inf)
        # Of the other tokens: the log of the sum of exponentials, and the entropy among them.
        log_others, entropies_of_others = _softmax_statistics(student, self.temperature)
        logits_k = saved.to(dtype) / self.temperature
        log_totals = torch.logaddexp(logits_k.logsumexp(-1), log_others)
        log_p = logits_k - _column(log_totals)
        log_rest_p = log_others - log_totals
        rest_p = log_rest_p.exp()
        entropies = -_expectation(log_p, log_p)
        entropies += torch.where(rest_p == 0, 0.0, rest_p * (entropies_of_others - log_rest_p))
        # What the rest's share of the gradient is divided among.
        of_others = torch.zeros_like(rest_p)
        if self.add_tail:
            compared_p, compared_q = (
                torch.cat([x, _column(rest)], 1) for x, rest in ((log_p, log_rest_p), (log_q, log_rest_q))
            )
            losses, slopes = self._whole(compared_p, compared_q)
            slopes = slopes - compared_p.exp() * slopes.sum(-1, keepdim=True)
            slopes, of_others = slopes[:, :-1], slopes[:, -1]
        else:
            # The derivatives of renormalised log-probabilities sum to what the normalisation takes off again.
            renormalised = log_p.log_softmax(-1)
            losses, slopes = self._whole(renormalised, log_q.log_softmax(-1))
            slopes = slopes - renormalised.exp() * slopes.sum(-1, keepdim=True)
        gradient = None
        if weights is not None:
            weights = weights.to(dtype) / self.temperature
            gradient = _softmax_gradient(student, ids, log_others, weights * of_others, self.temperature)
            gradient.scatter_(1, ids, (slopes * _column(weights)).to(gradient.dtype))
        student.scatter_(1, ids, saved)
        student[:, columns:] = saved_behind
        return RowDivergences(losses, entropies, log_q.exp().sum(-1), gradient)

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


def _softmax_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The log of the sum of exponentials of rows (t, V) over the temperature, and their softmaxes' entropies, (t,)."""
    rows, columns = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_totals, entropies = logits.new_empty((2, rows), dtype=dtype).unbind()
    if _uses_kernels(logits):
        if rows:
            arguments = (logits, log_totals, entropies, columns, logits.stride(0), 1 / temperature)
            import_triton_kernels(KERNELS).softmax_statistics_kernel[(rows,)](
                *arguments, COLUMNS=_COLUMNS, num_warps=_WARPS
            )
        return log_totals, entropies
    for part in _row_parts(logits):
        wide_logits = logits[part].to(dtype) / temperature
        log_totals[part] = wide_logits.logsumexp(-1)
        log_probs = wide_logits - _column(log_totals[part])
        entropies[part] = -_expectation(log_probs, log_probs)
    return log_totals, entropies


def _softmax_gradient(
    logits: Tensor, ids: Tensor, log_totals: Tensor, factors: Tensor, temperature: float
) -> Tensor:
    """Factors (t,) times softmaxes (t, V) of these log-sum-exps, in the dtype of the logits; anything at `ids`, where
    logits are −∞."""
    # Where all are −∞, the softmax is 0.
    log_totals = log_totals.clamp(min=torch.finfo(log_totals.dtype).min)
    gradient = logits.new_empty(logits.shape)
    if _uses_kernels(logits):
        if len(logits):
            columns = logits.shape[1]
            numbers = (gradient, columns, logits.stride(0), 1 / temperature)
            import_triton_kernels(KERNELS).logit_gradient_kernel[len(logits), -(-columns // _COLUMNS)](
                logits, ids[:, 0].contiguous(), -factors, log_totals, *numbers, COLUMNS=_COLUMNS
            )
        return gradient
    for part in _row_parts(logits):
        softmax = (logits[part].to(log_totals.dtype) / temperature - _column(log_totals[part])).exp_()
        gradient[part] = softmax.mul_(_column(factors[part])).to(logits.dtype)
    return gradient


def _uses_kernels(logits: Tensor) -> bool:
    return uses_softmax_kernels(logits.dtype, logits.device.type) and logits.stride(1) == 1


def _row_parts(logits: Tensor) -> Iterator[slice]:
    return cut_into_chunks(len(logits), max(1, len(logits) // _ROW_PARTS))


def _column(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)

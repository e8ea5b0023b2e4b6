"""Log-probabilities of tokens and numbers of their distributions, from logits (t, V), and their gradients at these."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.errors import LossError
from longspan.lazy import import_triton_kernels
from longspan.plain_text import short_text

KERNELS = "longspan.train.softmax_kernels"
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COLUMNS = 4096  # columns of logits that a program of a kernel has at a time
# Of a chunk's rows longspan copies the logits of one part at a time.
_ROW_PARTS = 8
# It takes derivatives (t,) of a loss by log-probabilities to its gradient (t, V) by logits. It is called once only, for
# it may write the gradient into memory that it keeps.
GradientOf = Callable[[Tensor], Tensor]


@torch.no_grad()
def target_log_probs_and_gradient(logits: Tensor, ids: Tensor) -> tuple[Tensor, GradientOf]:
    """Return log-probabilities (t,) of token `ids` (t,) under logits (t, V), and the function of their gradient.

    The softmax is in float32, in float64 for float64 logits. The derivative by logits is onehot − softmax.
    """
    logits = logits.detach()
    if uses_softmax_kernels(logits.dtype, logits.device.type) and logits.stride(1) == 1:
        return _log_probs_by_kernels(logits, ids)
    columns = ids.unsqueeze(1)
    wide_logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    wide_logits -= wide_logits.amax(-1, keepdim=True)
    target_logits = wide_logits.gather(1, columns).squeeze(1)  # (t,)
    total = wide_logits.exp_().sum(-1)  # (t,)

    def logit_gradient(slopes: Tensor) -> Tensor:
        slopes = slopes.to(wide_logits.dtype)
        wide_logits.mul_((-slopes / total).unsqueeze(1)).scatter_add_(1, columns, slopes.unsqueeze(1))
        return wide_logits.to(logits.dtype)

    return target_logits - total.log(), logit_gradient


def uses_softmax_kernels(dtype: torch.dtype, device: str) -> bool:
    """Return whether Triton kernels compute softmaxes of logits of this dtype on this type of device."""
    return device == "cuda" and dtype in _KERNEL_DTYPES and import_triton_kernels(KERNELS) is not None


def _log_probs_by_kernels(logits: Tensor, ids: Tensor) -> tuple[Tensor, GradientOf]:
    """The kernels keep no exponentials. Each row of `logits` is contiguous."""
    rows, vocabulary = logits.shape
    log_probs, log_total = logits.new_empty((2, rows), dtype=torch.float32).unbind()
    if rows:
        arguments = (logits, ids, log_probs, log_total, vocabulary, logits.stride(0))
        import_triton_kernels(KERNELS).log_probs_kernel[(rows,)](*arguments, COLUMNS=_COLUMNS)

    def logit_gradient(slopes: Tensor) -> Tensor:
        """Return slopes (t,) times (onehot − softmax), (t, V), in a new tensor."""
        gradient = logits.new_empty((rows, vocabulary))
        if rows:
            slopes = slopes.to(torch.float32).contiguous()
            arguments = (logits, ids, slopes, log_total, gradient, vocabulary, logits.stride(0), 1.0)
            import_triton_kernels(KERNELS).logit_gradient_kernel[rows, -(-vocabulary // _COLUMNS)](
                *arguments, COLUMNS=_COLUMNS
            )
        return gradient

    return log_probs, logit_gradient


@torch.no_grad()
def row_scores(logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, GradientOf]:
    """Return the scores themselves, (t,) of one column or (t, L), in float32 at least, and the function of their
    gradient.

    `ids` are not read: they are there because `target_log_probs_and_gradient`, in whose place this is used, has them.
    """
    scores = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    return scores.squeeze(1), lambda slopes: slopes.to(logits.dtype).reshape(logits.shape)


@torch.no_grad()
def add_entropy_gradient(gradient: Tensor, logits: Tensor, slopes: Tensor) -> None:
    """Add to `gradient` (t, V), in place, the derivative of entropies H of softmaxes p by logits, times slopes (t,).

    The derivative of H by logits is −p (log p + H).
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    for part in cut_into_chunks(len(logits), max(1, len(logits) // _ROW_PARTS)):
        # −inf becomes finite, for a token of probability 0 adds 0, and 0 · −inf is NaN
        log_probs = logits[part].to(dtype).log_softmax(-1).clamp_(min=torch.finfo(dtype).min)
        probs = log_probs.exp()
        entropies = -(probs * log_probs).sum(-1, keepdim=True)
        gradient[part] -= (log_probs.add_(entropies).mul_(probs) * slopes[part].unsqueeze(1)).to(gradient.dtype)


def cut_into_chunks(total: int, rows: int) -> Iterator[slice]:
    """Divide rows into runs of at most `rows` rows, as even as can be; no rows are one empty run."""
    count = max(1, -(-total // rows))
    for i in range(count):
        yield slice(total * i // count, total * (i + 1) // count)


DISTRIBUTION_VALUES = ("entropy", "top1", "mean_logits", "log_sum_sq_probs")
# There are fewer than _COLUMNS, as each lane keeps several sums.
_DISTRIBUTION_COLUMNS = 2048


def check_value_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of numbers, each once. Raises LossError for an unknown one, and for a text or None as the list."""
    is_list = isinstance(names, list | tuple)
    unique = tuple(dict.fromkeys(names)) if is_list else ()
    unknown_names: list[Any] = [name for name in unique if name not in DISTRIBUTION_VALUES] if is_list else [names]
    if unknown_names:
        raise LossError(
            f"also has {short_text(unknown_names[0])}; give a list of some of {', '.join(DISTRIBUTION_VALUES)}"
        )
    return unique


@torch.no_grad()
def distribution_values(logits: Tensor, ids: Tensor, names: Sequence[str]) -> Tensor:
    """Return numbers (k, t) by k names of the distributions p = softmax(logits), of logits (t, V) and target ids (t,).

    `entropy` is −Σ p log p in nats, `top1` 1 where the target is the likeliest token (of equal ones the first) and 0
    elsewhere, `mean_logits` the mean of the logits, `log_sum_sq_probs` log Σ p². All in float32, in float64 for float64
    logits. Kernels, where there are some, compute all of them in one pass over the logits.
    """
    if (numbers := distribution_values_by_kernel(logits.detach(), ids)) is not None:
        return numbers[[DISTRIBUTION_VALUES.index(name) for name in names]]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    values = logits.new_empty((len(names), len(logits)), dtype=dtype)
    for chunk in cut_into_chunks(len(logits), max(1, len(logits) // _ROW_PARTS)):
        for value, name in zip(values, names, strict=True):
            value[chunk] = _one_distribution_value(logits[chunk].detach(), ids[chunk], name, dtype)
    return values


def distribution_values_by_kernel(logits: Tensor, ids: Tensor) -> Tensor | None:
    """Return numbers (4, t) of distributions in one pass over logits (t, V), by a Triton kernel; None without one.

    They are the entropy, whether a target of `ids` (t,) is the likeliest token, the mean logit, and log Σ p².
    """
    if not (uses_softmax_kernels(logits.dtype, logits.device.type) and logits.stride(1) == 1):
        return None
    rows, vocabulary = logits.shape
    numbers = logits.new_empty((4, rows), dtype=torch.float32)
    if rows:
        arguments = (logits, ids, numbers, rows, vocabulary, logits.stride(0))
        import_triton_kernels(KERNELS).distribution_kernel[(rows,)](*arguments, COLUMNS=_DISTRIBUTION_COLUMNS)
    return numbers


def _one_distribution_value(logits: Tensor, ids: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Wide logits are freed on return: the next number makes its own."""
    if name == "top1":
        return (logits.argmax(-1) == ids).to(dtype)
    if name == "mean_logits":
        return logits.mean(-1, dtype=dtype)
    log_probs = logits.to(dtype).log_softmax(-1)
    if name == "log_sum_sq_probs":
        return log_probs.mul_(2).logsumexp(-1)  # p² = exp(2 log p)
    # a token that cannot come (−inf) adds nothing
    return -(log_probs.exp() * log_probs.clamp_(min=torch.finfo(dtype).min)).sum(-1)

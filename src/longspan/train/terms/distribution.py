"""Numbers of the distributions over the vocabulary that rows predict: entropy and the like, without gradients.

`token_log_probs(…, also=)` gives them of every token, and a loss of one's own reads those of its rows, as `at.entropy`.
They are those of the model's own logits, with its soft caps and scales, divided by the step's temperature.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.comm import World
from longspan.errors import LossError, short_text
from longspan.train.loss import cut_into_chunks, find_softmax_kernels, uses_kernels

DISTRIBUTION_VALUES = ("entropy", "top1", "mean_logits", "log_sum_sq_probs")
_COLUMNS = 2048  # that a program has at a time, with several sums in each lane
_PARTS = 8  # of a chunk's rows: copies of logits are of one part at a time


def check_value_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of numbers, each once. Raises LossError for an unknown one, and for a text in place of a list."""
    unique = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))  # a text is refused as it is
    unknown_names = [name for name in unique if isinstance(names, str) or name not in DISTRIBUTION_VALUES]
    if unknown_names:
        raise LossError(
            f"also has {short_text(unknown_names[0])}; give a list of some of {', '.join(DISTRIBUTION_VALUES)}"
        )
    return unique


def agree_on_names(names: tuple[str, ...], world: World) -> None:
    """Raise CommError, on every rank, unless all ranks ask for the same numbers."""
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()
    world.control.agree(digest, what="lists also=", hint="Give every rank the same names in the same order")


@torch.no_grad()
def distribution_values(logits: Tensor, ids: Tensor, names: Sequence[str]) -> Tensor:
    """Return numbers (k, t) by k names of the distributions p = softmax(logits), of logits (t, V) and target ids (t,).

    `entropy` is −Σ p log p in nats, `top1` 1 where the target is the likeliest token (of equal ones the first) and 0
    elsewhere, `mean_logits` the mean of the logits, `log_sum_sq_probs` log Σ p². All in float32, in float64 for float64
    logits. Kernels, where there are some, compute all of them in one pass over the logits.
    """
    if (numbers := kernel_distributions(logits.detach(), ids)) is not None:
        return numbers[[DISTRIBUTION_VALUES.index(name) for name in names]]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    values = logits.new_empty((len(names), len(logits)), dtype=dtype)
    for chunk in cut_into_chunks(len(logits), max(1, len(logits) // _PARTS)):
        for value, name in zip(values, names, strict=True):
            value[chunk] = _distribution_number(logits[chunk].detach(), ids[chunk], name, dtype)
    return values


def kernel_distributions(logits: Tensor, ids: Tensor) -> Tensor | None:
    """Return numbers (4, t) of distributions in one pass over logits (t, V), by a Triton kernel; None without one.

    They are the entropy, whether a target of `ids` (t,) is the likeliest token, the mean logit, and log Σ p².
    """
    if not (uses_kernels(logits.dtype, logits.device.type) and logits.stride(1) == 1):
        return None
    rows, vocabulary = logits.shape
    numbers = logits.new_empty((4, rows), dtype=torch.float32)
    if rows:
        arguments = (logits, ids, numbers, rows, vocabulary, logits.stride(0))
        find_softmax_kernels().distribution_kernel[(rows,)](*arguments, COLUMNS=_COLUMNS)
    return numbers


def _distribution_number(logits: Tensor, ids: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Compute the number of a name (t,) for the distributions of rows, from logits (t, V) and target ids (t,)."""
    if name == "top1":
        return (logits.argmax(-1) == ids).to(dtype)
    if name == "mean_logits":
        return logits.mean(-1, dtype=dtype)
    log_probs = logits.to(dtype).log_softmax(-1)
    if name == "log_sum_sq_probs":
        return log_probs.mul_(2).logsumexp(-1)  # p² = exp(2 log p)
    # a token that cannot come (−inf) adds nothing
    return -(log_probs.exp() * log_probs.clamp_(min=torch.finfo(dtype).min)).sum(-1)


class Distributions:
    """The distributions of some rows while their logits (t, V) exist; a number is computed when it is first read."""

    def __init__(self, logits: Tensor, ids: Tensor) -> None:
        """Take logits (t, V) and target ids (t,); no number is computed yet."""
        self._logits_and_ids: tuple[Tensor, Tensor] | None = (logits, ids)
        self._values = dict[str, Tensor]()

    def value(self, name: str) -> Tensor:
        """Return a number (t,) by its name. Raises LossError after `release_logits`, if it was not read before."""
        if name not in self._values:
            if self._logits_and_ids is None:
                raise LossError(
                    f"at.{name} is read after the loss has returned, when its logits are gone; read it in the loss and "
                    "keep the tensor"
                )
            logits, ids = self._logits_and_ids
            numbers = kernel_distributions(logits.detach(), ids)
            if numbers is not None:  # the kernel computes all of them at once
                self._values.update(zip(DISTRIBUTION_VALUES, numbers, strict=True))
            else:
                self._values[name] = distribution_values(logits, ids, (name,))[0]
        return self._values[name]

    def release_logits(self) -> None:
        """Let go of the logits, whose memory the next chunk takes; numbers that were read stay."""
        self._logits_and_ids = None

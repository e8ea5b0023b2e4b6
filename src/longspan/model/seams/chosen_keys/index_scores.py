"""Choice of keys on GPUs: scores of an indexer in runs of rows, whose k best are found by the k-th score and a count.

Only the k-th score is torch's `topk`: its order among equals has no part in the choice. Not covered: classes whose
scores are formed otherwise, and CPUs (`indexers.py`).
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longspan.attention.kernels import find_kernel

_SCORE_BYTES = 256 << 20  # of the scores of a run of rows
_ROWS = 64
_KEYS = 128
_KEYS_OF_ROW = 2048  # that a program scores, and walks in the scores of one row
# What an indexer does to scores up to its `topk`.
_SCORING = ["matmul", "relu", "matmul", "squeeze", "__invert__", "masked_fill", "topk"]


class ScoreOperands(TorchFunctionMode):
    """Notes what an indexer multiplies, in a forward pass of its class that gets no key.

    The scores of such a pass are empty, and queries (1, T, H, size) and weights (1, T, 1, H) are all that it computes.
    Nothing is changed; `can_score_by_kernel` and `queries_and_weights` are asked after the pass.
    """

    def __init__(self) -> None:
        """Begin with nothing noted: names of steps on empty scores, left operands of products, and the last cast to
        float32.
        """
        super().__init__()
        self._steps, self._products = list[str](), list[Tensor]()
        self._widened = (torch.empty(0), torch.empty(0))  # what `float` gave last for queries, and of what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note it if it is a product, a cast of queries or, behind them, a step on empty scores."""
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        first = args[0] if args else None
        if name == "float" and not self._products and isinstance(first, Tensor) and first.shape[-1]:
            self._widened = out, first
        is_positive = name in ("mul", "__mul__") and isinstance(args[1], float) and args[1] > 0  # the order stays
        of_scores = any(isinstance(x, Tensor) and x.ndim > 2 and not x.shape[-1] for x in args)
        if name == "matmul":
            self._products.append(args[0])
        if of_scores and not is_positive and name != "__get__" and self._products and "topk" not in self._steps:
            self._steps.append(name)
        return out

    def can_score_by_kernel(self) -> bool:
        """Return whether the pass formed scores Σ heads weight · relu(q · key), times a number above 0, and a kernel
        can sum them on this device and in this dtype.
        """
        return self._steps == _SCORING and len(self._products) == 2 and can_score(self._products[0])

    def queries_and_weights(self) -> tuple[Tensor, Tensor]:
        """Return q (T, H, size), in the type that it had before it was widened, and weights (T, H); for a pass that a
        kernel can score.
        """
        q, weights = self._products
        widened, before = self._widened
        return (before if widened is q else q)[0], weights[0, :, 0]


def can_score(q: Tensor) -> bool:
    """Return whether a kernel can score these queries: on a GPU, in float32, which is what classes widen q to."""
    return q.is_cuda and q.dtype == torch.float32 and not find_kernel("triton_flash").unsupported_reason(q.device)


def choose_best_keys(q: Tensor, weights: Tensor, keys: Tensor, first_position: int, k: int) -> Tensor:
    """Choose keys of rows at the positions from `first_position` on: (R, k) int32, ascending, −1 for none.

    q (R, H, size), weights (R, H) and keys (S, size) give the scores. Among equal ones the first are taken.
    """
    q, keys = (q, keys) if q.dtype == keys.dtype else (q.float(), keys.float())
    weights = weights.float().contiguous()
    q = q.contiguous()
    chosen = torch.empty((len(q), k), dtype=torch.int32, device=q.device)
    at_once = max(_ROWS, _SCORE_BYTES // (4 * len(keys)) // _ROWS * _ROWS)
    for start in range(0, len(q), at_once):
        stop = min(start + at_once, len(q))
        _choose_for_run(q[start:stop], weights[start:stop], keys, first_position + start, chosen[start:stop])
    return chosen


def _choose_for_run(q: Tensor, weights: Tensor, keys: Tensor, first_position: int, chosen: Tensor) -> None:
    """Write the keys of one run of rows, whose scores are held at once, into `chosen` (R, k).

    The k-th best score of a row is its least; of keys with that score the first `ties` are chosen, so that there are k.
    """
    kernels = import_module("longspan.model.seams.chosen_keys.index_score_kernels")
    (rows, heads, size), k = q.shape, chosen.shape[1]
    count = min(len(keys), first_position + rows)
    scores = q.new_empty((rows, count), dtype=torch.float32)
    constants = {"SIZE": size, "WIDTH": max(16, 1 << (size - 1).bit_length()), "ROWS": _ROWS, "KEYS": _KEYS}
    kernels.score_keys[-(-rows // _ROWS), -(-count // _KEYS)](
        *(q, weights, keys, scores, rows, count, first_position, heads),
        *(*q.stride()[:2], weights.stride(0), keys.stride(0), count),
        **constants,
        num_warps=8,
    )
    best = scores.topk(min(k, count), sorted=False).values
    least = best.amin(1)
    ties = k - (best > least[:, None]).sum(1, dtype=torch.int32)
    kernels.write_best_keys[(rows,)](
        *(scores, least, ties, chosen, count, k, count, chosen.stride(0)), KEYS=_KEYS_OF_ROW
    )

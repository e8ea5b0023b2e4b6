"""Choice of keys on GPUs: scores of an indexer in runs of rows, whose k best are found by the k-th score and a count;
and scores of blocks of keys.

Only the k-th score is torch's `topk`: its order among equals has no part in the choice. Not covered: classes whose
scores are formed otherwise, and CPUs (`indexers.py`).
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longspan.attention.kernels import find_kernel

# The limit holds for the scores of a run of rows.
_SCORE_BYTES = 256 << 20
# A program of `score_keys` has so many rows and keys.
_ROWS = 64
_KEYS = 128
# A program of `score_key_blocks` has so many blocks, and multiplies rows and keys of at most so many bytes.
_BLOCKS = 16
_OPERAND_BYTES = 32 << 10
# A program of `write_best_keys` reads so many keys at a time.
_KEYS_OF_ROW = 2048
# What an indexer does to scores up to its `topk`: it sums heads by a product, or weighs them and adds them up.
_SUMMED_BY_PRODUCT = ["matmul", "relu", "matmul", "squeeze", "__invert__", "masked_fill", "topk"]
_WEIGHED_AND_ADDED = ["matmul", "relu", "mul", "sum", "topk"]


class ScoreOperands(TorchFunctionMode):
    """Notes what an indexer multiplies, in a forward pass of its class that gets no key.

    The scores of such a pass have no columns: all that it computes are queries (1, T, H, size) and weights, (1, T, 1,
    H) or (1, T, H, 1). No result is changed. After the pass, `can_score_by_kernel` and `queries_and_weights` say what
    was noted.
    """

    def __init__(self) -> None:
        """Begin with nothing noted."""
        super().__init__()
        self._steps = list[str]()  # names of the functions that were called on empty scores
        # The operands are those of the products, in order, and the weights by which scores are multiplied.
        self._left_operands = list[Tensor]()
        # result and argument of the last cast to float32 before a product
        self._widened = (torch.empty(0), torch.empty(0))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note it if it is a product, a cast before one, or a step on empty scores after one."""
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        first = args[0] if args else None
        if name == "float" and not self._left_operands and isinstance(first, Tensor) and first.shape[-1]:
            self._widened = out, first
        if name == "matmul":
            self._left_operands.append(args[0])
        has_scores = any(isinstance(x, Tensor) and x.ndim > 2 and not x.shape[-1] for x in args)
        # A positive factor leaves the order of scores, and `__get__` reads an attribute.
        is_factor = name in ("mul", "__mul__") and isinstance(args[1], float) and args[1] > 0
        is_step = has_scores and not is_factor and name != "__get__"
        if is_step and self._left_operands and "topk" not in self._steps:
            if name in ("mul", "__mul__") and isinstance(args[1], Tensor):
                name = "mul"
                self._left_operands.append(args[1].transpose(-1, -2))
            self._steps.append(name)
        return out

    def can_score_by_kernel(self) -> bool:
        """Return whether the pass formed scores Σ heads weight · relu(q · key), times a number above 0, and a kernel
        can sum them on this device and in this dtype.
        """
        is_known = self._steps in (_SUMMED_BY_PRODUCT, _WEIGHED_AND_ADDED)
        return is_known and len(self._left_operands) == 2 and can_score(self._left_operands[0])

    def queries_and_weights(self) -> tuple[Tensor, Tensor]:
        """Return q (T, H, size), in the type that it had before its class widened it, and weights (T, H).

        Only for a pass that a kernel can score.
        """
        q, weights = self._left_operands
        widened, before = self._widened
        return (before if widened is q else q)[0], weights[0, :, 0]


def can_score(q: Tensor) -> bool:
    """Return whether a kernel can score these queries: on a GPU, in float32, which is what classes widen q to."""
    return q.is_cuda and q.dtype == torch.float32 and not find_kernel("triton_flash").unsupported_reason(q.device)


def choose_best_keys(
    q: Tensor, weights: Tensor, keys: Tensor, first_position: int, k: int, stride: int = 1
) -> Tensor:
    """Choose the k best keys for R rows, which stand at `first_position` and after: (R, k) int32, ascending.

    Key j stands at position j · stride + stride − 1, and a row may choose keys up to its own position; where these are
    fewer than k, −1 fills its columns. q (R, H, size), weights (R, H) and keys (S, size) give the scores. Among equal
    ones the first are taken.
    """
    if q.dtype != keys.dtype:
        q, keys = q.float(), keys.float()
    weights = weights.float().contiguous()
    q = q.contiguous()
    chosen = torch.full((len(q), k), -1, dtype=torch.int32, device=q.device)
    at_once = max(_ROWS, _SCORE_BYTES // (4 * max(1, len(keys))) // _ROWS * _ROWS)
    for start in range(0, len(q), at_once):
        stop = min(start + at_once, len(q))
        first = first_position + start
        _choose_for_run(q[start:stop], weights[start:stop], keys, first, chosen[start:stop], stride)
    return chosen


def score_blocks(q: Tensor, keys: Tensor, first_position: int, block: int) -> Tensor:
    """Return each block's best score for R rows, which stand at `first_position` and after: (heads, R, blocks) float32.

    A score is q · key of q (heads, R, size) and keys (S, size). Block b has the keys from b · `block` on; a row sees
    keys up to its own position, and has −∞ of a block without one. Where no kernel can score, products of all keys are
    formed.
    """
    if not can_score(q[:, :0].float()):
        products = q.float() @ keys.float().T
        position = torch.arange(len(keys), device=q.device)
        last = first_position + torch.arange(q.shape[1], device=q.device)
        products = products.masked_fill(position > last[:, None], -torch.inf)
        products = F.pad(products, (0, -len(keys) % block), value=-torch.inf)
        return products.unflatten(2, (-1, block)).amax(3)
    if q.dtype != keys.dtype or q.itemsize > 2:
        q, keys = q.float(), keys.float()
    q, keys = q.contiguous(), keys.contiguous()
    heads, rows, size = q.shape
    blocks = -(-len(keys) // block)
    scores = q.new_empty((heads, rows, blocks), dtype=torch.float32)
    width = _power_of_two(size)
    at_once = min(128, _OPERAND_BYTES // (width * q.itemsize))
    constants = {"SIZE": size, "WIDTH": width, "BLOCK": block, "ROWS": at_once, "BLOCKS": _BLOCKS}
    kernels = import_module("longspan.model.seams.chosen_keys.index_score_kernels")
    kernels.score_key_blocks[-(-rows // at_once), -(-blocks // _BLOCKS), heads](
        *(q, keys, scores, rows, len(keys), blocks, first_position),
        *(*q.stride()[:2], keys.stride(0)),
        **constants,
        KEYS=min(at_once, _power_of_two(block)),
        num_warps=8,
        num_stages=2,
    )
    return scores


def _power_of_two(size: int) -> int:
    """The smallest that holds so many numbers, and that a product of matrices takes."""
    return max(16, 1 << (size - 1).bit_length())


def _choose_for_run(
    q: Tensor, weights: Tensor, keys: Tensor, first_position: int, chosen: Tensor, stride: int
) -> None:
    """A row's `least` score is its k-th best one; of the keys with that score the first `ties` are chosen: k in all."""
    kernels = import_module("longspan.model.seams.chosen_keys.index_score_kernels")
    rows, heads, size = q.shape
    k = chosen.shape[1]
    # Any of the rows may choose among so many keys.
    count = min(len(keys), (first_position + rows) // stride)
    if not count:
        return
    scores = q.new_empty((rows, count), dtype=torch.float32)
    constants = {"SIZE": size, "WIDTH": _power_of_two(size), "ROWS": _ROWS, "KEYS": _KEYS}
    kernels.score_keys[-(-rows // _ROWS), -(-count // _KEYS)](
        *(q, weights, keys, scores, rows, count, first_position, stride, heads),
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

"""FlashAttention in Triton, for what torch's kernels and FlashAttention-4 lack: heads up to 512, chosen keys.

All tiles of a launch at once, by FlashAttention 2 (https://arxiv.org/abs/2307.08691). Programs own blocks of rows or
of keys, so that nothing is added by two of them and results are the same bits each time.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved, unsupported_capability_reason
from longspan.attention.rows import contiguous_heads
from longspan.attention.tiles import Launch
from longspan.lazy import import_triton_kernels

LARGEST = 512
_KERNELS = "longspan.attention.kernels.triton_flash_kernels"


class BlockSizes(NamedTuple):
    """How a kernel is launched: rows and keys of a block, warps, stages of loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


# By the head's width (a power of two, from 128), the fastest on an H200 first; where shared memory is too small, the
# next.
FORWARD: dict[int, tuple[BlockSizes, ...]] = {
    128: (BlockSizes(64, 64, 4, 3), BlockSizes(64, 32, 4, 2)),
    256: (BlockSizes(128, 64, 8, 2), BlockSizes(64, 32, 4, 2), BlockSizes(32, 32, 4, 1)),
    512: (BlockSizes(64, 32, 8, 2), BlockSizes(32, 32, 4, 1), BlockSizes(16, 16, 4, 1)),
}
QUERY_GRADIENTS: dict[int, tuple[BlockSizes, ...]] = {
    128: (BlockSizes(128, 64, 8, 3), BlockSizes(64, 32, 4, 2)),
    256: (BlockSizes(128, 64, 8, 1), BlockSizes(64, 32, 4, 1), BlockSizes(32, 16, 4, 1)),
    512: (BlockSizes(64, 32, 8, 1), BlockSizes(32, 16, 4, 1), BlockSizes(16, 16, 4, 1)),
}
KEY_GRADIENTS: dict[int, tuple[BlockSizes, ...]] = {
    128: (BlockSizes(64, 64, 4, 2), BlockSizes(32, 64, 4, 2)),
    256: (BlockSizes(32, 64, 8, 2), BlockSizes(16, 32, 4, 1)),
    512: (BlockSizes(32, 64, 8, 1), BlockSizes(16, 32, 4, 1), BlockSizes(16, 16, 4, 1)),
}
_MIN_TABLE_WIDTH = 128  # the narrowest of the tables
_PACKED = (4, 256)  # rows and chosen keys that a program packs at a time
_MAX_JOINT_WIDTH = 256  # the widest head whose dk and dv are summed in one program
# So many programs of key gradients keep the multiprocessors of a GPU busy.
_FEWEST_PROGRAMS = 256
# This remembers which blocks of a kernel fit, by kernel, width, dtype and device.
_fitting: dict[Any, int] = {}


@cache
def unsupported_reason(device: torch.device) -> str:
    """Return what this installation or GPU lacks for Triton's kernels, as "needs …"; "" for nothing."""
    if find_spec("triton") is None:
        return "needs triton, which torch's builds for GPUs bring"
    return unsupported_capability_reason(device, range(8, 100), "8.0")


def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor]:
    """Attend from q (Tq, N, H) to k (Tk, K, H), v (Tk, K, Hv): out (Tq, N, Hv), lse (Tq, N) float32."""
    q, k, v = (contiguous_heads(x) for x in (q, k, v))
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    bits = _pack_bits(launch, call)

    def launch_blocks(blocks: BlockSizes) -> None:
        block_list = launch.blocks(blocks.rows, of_keys=False)
        import_triton_kernels(_KERNELS).forward[len(block_list), q.shape[1]](
            *(q, k, v, out, lse, block_list, *launch.cu_seqlens, *bits, q.shape[1] // k.shape[1]),
            *_score_arguments(launch, call),
            *strides_of(q, k, v),
            **_call_constants(q, v, launch, call),
            **blocks.constants,
        )

    launch_fitting_blocks("forward", FORWARD, q, v, launch_blocks)
    return out, lse


def backward(dout: Tensor, saved: Saved, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this block: dq (Tq, N, H) by one kernel, dk (Tk, K, H) and dv (Tk, K, Hv) by another."""
    q, k, v, dout = (contiguous_heads(x) for x in (saved.q, saved.k, saved.v, dout))
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    tensors = (q, k, v, dout, saved.lse.contiguous(), saved.deltas(dout).contiguous())
    bits = _pack_bits(launch, call)
    strides = strides_of(q, k, v, dout)
    group = q.shape[1] // k.shape[1]
    shared = (*launch.cu_seqlens, *bits, group, *_score_arguments(launch, call), *strides)
    constants = _call_constants(q, v, launch, call)

    def launch_query_gradients(blocks: BlockSizes) -> None:
        block_list = launch.blocks(blocks.rows, of_keys=False)
        import_triton_kernels(_KERNELS).query_gradients[len(block_list), q.shape[1]](
            *(*tensors, dq, block_list, *shared), **constants, **blocks.constants
        )

    # dk and dv of the blocks that fit
    key_gradients: list[Tensor] = []

    def launch_key_gradients(blocks: BlockSizes) -> None:
        """Launch once for dk and dv; of wide heads, whose two sums do not fit the registers, once for each. Where keys
        are so few that their programs leave multiprocessors idle, these share the query heads of a key."""
        block_list = launch.blocks(blocks.keys, of_keys=True)
        shares = max(1, min(group, _FEWEST_PROGRAMS // max(1, len(block_list) * k.shape[1])))
        sums = [x.new_empty((shares, *x.shape), dtype=x.dtype if shares == 1 else torch.float32) for x in (k, v)]
        one_by_one = constants["WIDTH"] + constants["V_WIDTH"] > 2 * _MAX_JOINT_WIDTH
        for wants_k, wants_v in ((True, False), (False, True)) if one_by_one else ((True, True),):
            import_triton_kernels(_KERNELS).key_gradients[len(block_list), k.shape[1], shares](
                *(*tensors, *sums, len(launch.tiling), block_list, *shared),
                WANTS_K=wants_k,
                WANTS_V=wants_v,
                **constants,
                **blocks.constants,
            )
        key_gradients[:] = [x[0] if shares == 1 else x.sum(0) for x in sums]

    launch_fitting_blocks("query_gradients", QUERY_GRADIENTS, q, v, launch_query_gradients)
    launch_fitting_blocks("key_gradients", KEY_GRADIENTS, q, v, launch_key_gradients)
    return dq, key_gradients[0], key_gradients[1]


def _pack_bits(launch: Launch, call: AttendCall) -> tuple[Tensor | None, Tensor | None, int]:
    """One bit a key in words of 64 bits (`KeyBits`), and the word at which each tile begins, both int64; and how many
    words lie between two key/value heads, 0 where all have the same bits."""
    if call.indices is None:
        return None, None, 0
    places, place_starts, bit_starts, words = launch.key_bits
    indices = call.indices.contiguous()
    choices = indices.shape[1] if call.by_head else 1
    bits = torch.zeros(choices * words, dtype=torch.int64, device=places.device)
    rows, columns = _PACKED
    block_list = launch.blocks(rows, of_keys=False)
    import_triton_kernels(_KERNELS).pack_bits[len(block_list), choices](
        *(indices, bits, block_list, *launch.cu_seqlens, places, place_starts, bit_starts, words),
        *(indices.shape[-1], rows, columns, call.block_size),
    )
    return bits, bit_starts, words if call.by_head else 0


def launch_fitting_blocks(
    name: str,
    table: Mapping[int, tuple[BlockSizes, ...]],
    q: Tensor,
    v: Tensor,
    launch_blocks: Callable[[BlockSizes], None],
) -> None:
    """Call `launch_blocks` with one choice of blocks after another, until a launch fits the device's shared memory.

    The choices are those of `table` for the head sizes of q and v. The one that fits is remembered by kernel, head
    sizes, dtype and device: later calls begin with it. Where none fits, the last one's OutOfResources is raised.
    """
    key = (name, padded_size(q), padded_size(v), q.dtype, q.device)
    choices = table[max(_MIN_TABLE_WIDTH, padded_size(q), padded_size(v))]
    for index in range(_fitting.get(key, 0), len(choices)):
        try:
            launch_blocks(choices[index])
            _fitting[key] = index
            return
        except import_triton_kernels(_KERNELS).OutOfResources:
            if index + 1 == len(choices):
                raise


def _score_arguments(launch: Launch, call: AttendCall) -> tuple[float, float, int, int]:
    """An absent one, which HAS_… leaves out, may be any number."""
    return call.scale, call.softcap or 1.0, launch.left or 0, launch.right or 0


def _call_constants(q: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> dict[str, Any]:
    return {
        "HAS_CAP": call.softcap is not None,
        "HAS_LEFT": launch.left is not None,
        "HAS_RIGHT": launch.right is not None,
        "HAS_BITS": call.indices is not None,
        "STRIDE": launch.tiling.stride,
        **head_sizes(q, v),
    }


def head_sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the head sizes of keys and values, exact and as Triton's blocks take them."""
    return {"SIZE": k.shape[2], "V_SIZE": v.shape[2], "WIDTH": padded_size(k), "V_WIDTH": padded_size(v)}


def padded_size(x: Tensor) -> int:
    """Return the head size of x as the power of two, 16 at least, that Triton's blocks take."""
    return max(16, 1 << (x.shape[2] - 1).bit_length())


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of rows and of heads of each tensor, one tensor after another."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])

"""A call of `attend` as one value, and one block of it: what is computed, by which kernel, and with whom.

Its arguments are checked and packed in `arguments.py`, once for all layers of a micro-batch. A block is the local query
rows against one set of key rows. The communication patterns (`ring.py`, `all_gather.py`, `all_to_all.py`) decide which
key rows there are and when; what is computed with them is here, and is the same for all patterns. Attention of disjoint
key sets is merged by its log-sum-exp, gradients are added by rows (`rows.py`).

Dropout's mask depends only on who attends to whom. Whether a weight is kept is a hash of (seed, query head, document,
query position, key position), all as they are in the whole micro-batch. So the mask is the same for every degree,
communication type, rank and recomputation, in forward and in backward, and nothing of it is stored. The hash is
splitmix64's finaliser (Steele, Lea, Flood 2014), in 64-bit integers that wrap, which CPUs and GPUs do alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan.attention.members import Members
from longspan.attention.rows import Partial, RowSum, deltas, take_rows
from longspan.attention.tiles import Launch, Mask, Tile
from longspan.comm import Addend, SequenceShard
from longspan.plan import AttentionCall

_BITS = 31  # of the hash that are compared with the rate


def _to_signed_word(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _to_signed_word(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _to_signed_word(0xBF58476D1CE4E5B9), _to_signed_word(0x94D049BB133111EB)


@dataclass(frozen=True)
class Dropout:
    """Weights are zeroed with probability `rate`, in multiples of 2 ** −31, and the others divided by 1 − rate."""

    rate: float
    seed: int
    first_head: int = 0  # of the tensors at hand, among all query heads

    def from_head(self, head: int) -> "Dropout":
        """Return the same dropout for a slice of the heads at hand that begins at this one."""
        return replace(self, first_head=self.first_head + head)

    def factors(self, launch: Launch, tile: Tile, heads: int, dtype: torch.dtype) -> Tensor:
        """Return what each weight of a tile is multiplied by: (heads, query rows, key rows), 0 or 1 / (1 − rate).

        A weight is kept where the hash of seed, head, document and both positions, cut to its upper bits, is at least
        the rate: the same at every degree, as no rank's place enters.
        """
        document, q_position, k_position = launch.tokens
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        head = torch.arange(self.first_head, self.first_head + heads, device=launch.device)
        row = _absorb_word(
            _absorb_word(_absorb_word(_to_signed_word(self.seed), head)[:, None], document[rows]), q_position[rows]
        )
        word = _absorb_word(row.unsqueeze(-1), k_position[keys])  # (heads, query rows, key rows)
        is_kept = _shift_right(word, 64 - _BITS) >= round(self.rate * (1 << _BITS))
        return is_kept.to(dtype).div_(1.0 - self.rate)


def mix_seed(*words: int) -> int:
    """Mix several integers into one seed."""
    state = torch.zeros((), dtype=torch.int64)
    for word in words:
        state = _absorb_word(state, torch.tensor(_to_signed_word(word)))
    return int(state)


def _absorb_word(state: Tensor | int, word: Tensor) -> Tensor:
    """Return splitmix64's finaliser of state + (word + 1) · golden ratio; with the 1 a word of 0 changes the state."""
    x = state + (word + 1) * _GOLDEN
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return x >> bits of unsigned words: the sign bit does not spread."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


_CPU, _CAUSAL = torch.device("cpu"), Mask()


class Saved(NamedTuple):
    """What backward needs of forward: q (T, N, H), k (Tk, K, H), v (Tk, K, Hv), out (T, N, Hv) and lse (T, N).

    `out` and `lse` are over the keys of all blocks, whichever block k and v are. For kernels that take them, `out` may
    be the sums dout · out of each row and head instead (T, N).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def deltas(self, dout: Tensor) -> Tensor:
        """Return dout · out of each row and head (T, N), in the accumulation dtype."""
        return self.out if self.out.ndim == 2 else deltas(dout, self.out)


class BlockKernel(Protocol):
    """What computes one launch: a row of the support table (`kernels/table.py`)."""

    @property
    def forward(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """(q, k, v, launch, call) -> out, lse."""
        ...

    @property
    def backward(self) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        """(dout, saved, launch, call) -> dq, dk, dv."""
        ...

    @property
    def takes_deltas(self) -> Callable[..., bool]:
        """(call) -> whether backward takes dout · out of each row and head in place of the output."""
        ...


class CallPart(NamedTuple):
    """The local rows of one group, how the group communicates, and who its members are."""

    rows: slice
    cp_comm_type: str
    members: Members


@dataclass(frozen=True)
class AttendCall:
    """What `attend` does for q (T, N, H), k (T, K, H) and v (T, K, Hv) over a shard.

    N, K, H and Hv are `heads`, `kv_heads`, `head_size` and `value_size`. `scale` is above 0, as kernels
    find the largest score before they scale; the sign of a negative one is in `sign`, by which q is multiplied (0 for a
    scale of 0). `sinks` (N,) and `dropout` are those of the heads at hand. `one_document`: every group has one
    document, so that a launch has few tiles. `spans`: rows of some document see later ones too (`layout/spans.py`),
    under a causal mask. `deterministic`: the same bits again; torch's own switch by default. A caller who only looks
    for a kernel or a communication type leaves out the rest:

    >>> choose_kernel(AttendCall(32, 8, 192, 128, torch.float32)).name
    'cpu_flash'
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = _CPU
    mask: Mask = _CAUSAL
    scale: float = 1.0
    sign: int = 1
    softcap: float | None = None
    dropout: Dropout | None = None
    max_gather_bytes: int | None = None
    one_document: bool = False
    spans: bool = False
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    kernel: BlockKernel | None = None
    parts: tuple[CallPart, ...] = ()
    sinks: Tensor | None = field(default=None, compare=False)

    @property
    def sizes(self) -> AttentionCall:
        """Return the sizes by which `Machine` predicts the time of this call in a step with a backward pass."""
        return AttentionCall(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_size,
            value_dim=self.value_size,
            bytes_per_number=self.dtype.itemsize,
            causal=self.mask.causal,
            window=self.mask.window,
            chunk=self.mask.chunk,
        )

    @property
    def features(self) -> frozenset[str]:
        """Return which of "window", "softcap" and "dropout" the call has; some kernels lack them."""
        window = self.mask.window or self.spans or None  # later keys of a span are masked as by a window
        values = {"window": window, "softcap": self.softcap, "dropout": self.dropout}
        return frozenset(name for name, value in values.items() if value is not None)

    def for_heads(self, start: int, stop: int) -> "AttendCall":
        """Return the same call for query heads start to stop of the tensors at hand: sinks and dropout go by head."""
        if self.sinks is None and self.dropout is None:
            return self
        sinks = None if self.sinks is None else self.sinks[start:stop]
        return replace(self, sinks=sinks, dropout=self.dropout and self.dropout.from_head(start))


class AttentionCache:
    """What attention derives from a shard, for all layers (`cache_of`).

    `calls` by their tensors' shapes and arguments; `members` by the group's index, the number of neighbours that act as
    one member, and the mask; `automatic`, the type that "auto" stands for, by the group's index and the call.
    """

    def __init__(self, listed_by_layer: bool) -> None:
        self.listed_by_layer = listed_by_layer  # whether a group's types are a list with one per layer
        self.calls: dict[Any, AttendCall] = {}
        self.members: dict[tuple[int, int, Mask], Members] = {}
        self.automatic: dict[Any, tuple[str, int]] = {}  # what "auto" chose: a type and its a2a size


_caches = WeakKeyDictionary[SequenceShard, AttentionCache]()  # freed with their shards


def cache_of(shard: SequenceShard) -> AttentionCache:
    """Return the cache of what attention derives from a shard, made on first use."""
    cache = _caches.get(shard)
    if cache is None:
        has_lists = any(not isinstance(group.cp_comm_type, str) for group in shard.micro_batch.groups)
        cache = _caches[shard] = AttentionCache(listed_by_layer=has_lists)
    return cache


class Gradients(NamedTuple):
    """Gradients of the local q, k and v, those of k and v summed over the group; of the sinks, this rank's part."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def add_block(total: Partial, q: Tensor, k: Tensor, v: Tensor, launches: tuple[Launch, ...], call: AttendCall) -> None:
    """Add to `total` the attention of q (T, N, H) to this block's k (Tk, K, H), v (Tk, K, Hv)."""
    assert call.kernel is not None
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        out, lse = call.kernel.forward(take_rows(q, rows), take_rows(k, keys), take_rows(v, keys), launch, call)
        total.add(rows, out, lse)


def block_gradients(
    dq: RowSum, dout: Tensor, saved: Saved, launches: tuple[Launch, ...], call: AttendCall
) -> list[Addend]:
    """Add a block's part of the queries' gradient to `dq`; return the gradients of its keys and values by launch.

    The k and v of `saved` are the block's.
    """
    assert call.kernel is not None
    addends, (q, k, v, out, lse) = list[Addend](), saved
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        launch_saved = Saved(
            take_rows(q, rows), take_rows(k, keys), take_rows(v, keys), take_rows(out, rows), take_rows(lse, rows)
        )
        gradient, *key_gradients = call.kernel.backward(take_rows(dout, rows), launch_saved, launch, call)
        dq.add(rows, gradient)
        addends.append(Addend(keys, key_gradients))
    return addends


def sum_addends(addends: list[Addend], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the addends of a block's gradients: dk (Tk, K, H) and dv (Tk, K, Hv), for the block's k and v."""
    dk, dv = RowSum(tuple(k.shape), k), RowSum(tuple(v.shape), v)
    for rows, (k_addend, v_addend) in addends:
        dk.add(rows, k_addend)
        dv.add(rows, v_addend)
    return dk.result(), dv.result()


def sink_gradient(dout: Tensor, saved: Saved, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks (N,): −Σ rows w · (dout · out), with w = exp(sink − lse) the sink's weight.

    A logit's gradient in softmax is w · (dout · value − dout · out), and a sink has the value 0.
    """
    if sinks is None:
        return None
    weight = (sinks.to(saved.lse.dtype) - saved.lse).exp_()
    return -weight.mul_(saved.deltas(dout)).sum(0)

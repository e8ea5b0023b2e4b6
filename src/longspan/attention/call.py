"""A call of `attend` as one value, the kernel that computes it, and what backward keeps of it.

Also here is the table, per shard, of calls and members that all layers share (`cache_of`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspan.attention.dropout import Dropout
from longspan.attention.masks import Mask
from longspan.attention.members import Members
from longspan.attention.rows import RowIndex, deltas, take_rows
from longspan.comm import SequenceShard
from longspan.comm.cuda_graphs import Replay
from longspan.plan import AttentionCall

_CPU = torch.device("cpu")
_CAUSAL = Mask()


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
        """dout · out of each row and head (T, N), in the accumulation dtype."""
        return self.out if self.out.ndim == 2 else deltas(dout, self.out)


class CallPart(NamedTuple):
    """The local rows of one group, how the group communicates, and who its members are.

    `v_rows` are the part's rows of v: `rows`, but where v is entries (`entries.py`).
    """

    rows: slice
    cp_comm_type: str
    members: Members
    v_rows: slice


@dataclass(frozen=True)
class AttendCall:
    """What `attend` does for q (T, N, H), k (T, K, H) and v (T, K, Hv) over a shard.

    N, K, H and Hv are `heads`, `kv_heads`, `head_dim` and `value_dim`. `scale` is above 0, as kernels
    find the largest score before they scale; the sign of a negative one is in `sign`, by which q is multiplied (0 for a
    scale of 0). `sinks` (N,) and `dropout` are those of the heads at hand. `one_document`: every group has one
    document, so that a launch has few tiles. `spans`: rows of some document see later ones too (`layout/segments.py`),
    under a causal mask. `indexed`: rows see chosen keys, those at the positions `indices` (rows at hand, k), or with a
    `block_size` the keys of the blocks of these numbers; `by_head`: each key/value head has a choice of its own (rows
    at hand, K, k). `chosen_keys` is how many a row may choose at most, `longest` how many rows the longest document has
    (0: not known). `latents`: a key is the numbers of its value and then those of k. `stride`: keys are entries, of
    which rows see one more every `stride` rows, beside the rows of `window_call`. `with_lse`: the log-sum-exp is
    returned too, with a gradient. `replays` are recordings of the call's launches, where it may have any.
    `deterministic`: the same bits again; torch's own switch by default. A caller who only looks for a kernel or a
    communication type leaves out the rest:

    >>> choose_kernel(AttendCall(32, 8, 192, 128, torch.float32)).name
    'cpu_flash'
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = _CPU
    mask: Mask = _CAUSAL
    scale: float = 1.0
    sign: int = 1
    softcap: float | None = None
    dropout: Dropout | None = None
    one_document: bool = False
    spans: bool = False
    indexed: bool = False
    block_size: int = 1
    by_head: bool = False
    chosen_keys: int = 0
    longest: int = 0
    latents: bool = False
    stride: int = 1
    with_lse: bool = False
    window_call: "AttendCall | None" = None
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    kernel: "Kernel | None" = None
    parts: tuple[CallPart, ...] = ()
    sinks: Tensor | None = field(default=None, compare=False)
    indices: Tensor | None = field(default=None, compare=False)
    replays: dict[Any, Replay] | None = field(default=None, compare=False, repr=False)

    @property
    def sizes(self) -> AttentionCall:
        """The sizes by which `Machine` predicts the time of this call in a step with a backward pass."""
        return AttentionCall(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            bytes_per_number=self.dtype.itemsize,
            causal=self.mask.causal,
            window=self.mask.window,
            chunk=self.mask.chunk,
        )

    @property
    def features(self) -> frozenset[str]:
        """Which features the call has that some kernels lack: window, softcap, dropout, indices, blocks, latents,
        stride."""
        values = {
            "window": self.mask.window or self.spans,  # later keys of a span are masked as by a window
            "softcap": self.softcap,
            "dropout": self.dropout,
            "indices": self.indexed,
            "blocks": self.indexed and (self.block_size > 1 or self.by_head),
            "latents": self.latents,
            "stride": self.stride > 1,
        }
        return frozenset(name for name, value in values.items() if value)

    def for_heads(self, start: int, stop: int) -> "AttendCall":
        """Return the same call for query heads start to stop of the tensors at hand: sinks, dropout and choices
        `by_head` go by head.
        """
        if self.sinks is None and self.dropout is None and not self.by_head:
            return self
        sinks = None if self.sinks is None else self.sinks[start:stop]
        dropout = self.dropout and replace(self.dropout, first_head=self.dropout.first_head + start)
        indices = self.indices
        if indices is not None and self.by_head:
            group = self.heads // self.kv_heads
            indices = indices[:, start // group : -(-stop // group)]
        return replace(self, sinks=sinks, dropout=dropout, indices=indices)

    def for_rows(self, rows: RowIndex) -> "AttendCall":
        """Return the same call for some of the rows at hand: indices go by row."""
        if self.indices is None:
            return self
        return replace(self, indices=take_rows(self.indices, rows))


@dataclass(frozen=True)
class HeadSizes:
    """Head sizes of queries and values that a kernel takes, padded with zeros where it wants others.

    `largest` bounds both (None: no bound); `pairs` of (query, value) are taken beyond it.
    """

    largest: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        if self.largest is None:
            return "any"
        beyond = "".join(f", or {query} with values of {value}" for query, value in self.pairs)
        return f"at most {self.largest}{beyond}"


@dataclass(frozen=True)
class Kernel:
    """A row of the support table: what a kernel can do, and its two functions.

    `forward(q, k, v, launch, call)` returns out and lse, `backward(dout, saved, launch, call)` dq, dk and dv. `needs`
    is what the kernel depends on; `unsupported_reason` returns what this installation or device lacks of that ("" where
    nothing). `features` are those of a call that it can compute, `required` those that a call must have.
    `one_document_only`: by name it runs every launch, but without a name it is chosen only for calls with one document
    in each group, and only for calls of which `pays` says so (None: all). `takes_deltas` tells of a call whether
    backward takes dout · out of each row and head in place of the output.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[..., tuple[Tensor, Tensor]] = field(repr=False)
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(repr=False)
    features: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    head_sizes: HeadSizes = HeadSizes()
    deterministic: bool = True
    one_document_only: bool = False
    needs: str = ""
    unsupported_reason: Callable[[torch.device], str] = field(default=lambda device: "", repr=False)
    takes_deltas: Callable[[AttendCall], bool] = field(default=lambda call: False, repr=False)
    pays: Callable[[AttendCall], bool] | None = field(default=None, repr=False)

    def unsupported_call_reason(self, call: AttendCall) -> str:
        """Return why this kernel cannot compute the call, as "needs …, got …"; "" where it can."""
        if call.device.type not in self.devices:
            return f"needs {' or '.join(self.devices)} tensors, got {call.device.type}"
        if call.dtype not in self.dtypes:
            return f"needs {' or '.join(dtype_name(d) for d in self.dtypes)}, got {dtype_name(call.dtype)}"
        sizes = call.head_dim, call.value_dim
        largest = self.head_sizes.largest
        if largest is not None and max(sizes) > largest and sizes not in self.head_sizes.pairs:
            got = str(call.head_dim)
            got += "" if call.value_dim == call.head_dim else f" with values of {call.value_dim}"
            return f"needs a head size of {self.head_sizes}, got {got}"
        if unsupported := call.features - self.features:
            only_spans = call.spans and call.mask.window is None  # kernels compute spans as windows
            extra = " and ".join(
                "spans" if only_spans and name == "window" else name for name in sorted(unsupported)
            )
            return f"needs a call without {extra}, got {extra}"
        if missing := self.required - call.features:
            needed = " and ".join(sorted(self.required))
            return f"needs a call with {needed}, got none of {' and '.join(sorted(missing))}"
        if call.with_lse and not self.takes_deltas(call):
            return "needs a call without with_lse, whose gradient is one of dout · out, got with_lse"
        if call.deterministic and not self.deterministic:
            return "needs torch.use_deterministic_algorithms(False), got deterministic mode"
        return self.unsupported_reason(call.device)

    def suits(self, call: AttendCall) -> bool:
        """Whether the kernel can compute the call and may be chosen without being named."""
        if self.pays is not None and not self.pays(call):
            return False
        return (call.one_document or not self.one_document_only) and not self.unsupported_call_reason(call)


def unsupported_capability_reason(device: torch.device, capabilities: range, named: str) -> str:
    """Return why a kernel cannot run on this GPU, whose major capability must be in `capabilities`; "" where it can.

    `named` has the capabilities in words, for the text.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major in capabilities:
        return ""
    return f"needs compute capability {named}, got {major}.{minor}"


def dtype_name(value: Any) -> str:
    """Return the name of a dtype without its module, as "bfloat16", for messages."""
    return str(value).removeprefix("torch.")


class AttentionCache:
    """What attention derives from a shard, for all layers (`cache_of`).

    `calls` by their tensors' shapes and arguments; `members` by the group's index, the number of neighbours that act as
    one member, and the mask.
    """

    def __init__(self, listed_by_layer: bool) -> None:
        self.listed_by_layer = listed_by_layer  # whether a group's types are a list with one per layer
        self.calls: dict[Any, AttendCall] = {}
        self.members: dict[tuple[int, int, Mask], Members] = {}
        # What `entries.shard_entries` makes, by its arguments.
        self.entries: dict[Any, Any] = {}


_caches = WeakKeyDictionary[SequenceShard, AttentionCache]()  # freed with their shards


def cache_of(shard: SequenceShard) -> AttentionCache:
    """Return what attention has derived from this shard so far; empty at first, and freed with the shard."""
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

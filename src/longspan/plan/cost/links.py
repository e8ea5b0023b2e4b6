"""The links of a machine: how long messages take inside a host and between hosts, by their size and kind.

A link is one level of the network. What travels over it is an exchange (every slot sends to every other), a gather (all
slots receive all rows) or a message from slot to slot, which a single slot of a host may send while the others are
silent, or all of them at once. Where they were measured, the gathers and sums of sharded parameters (FSDP2) have
speeds of their own.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import PlanError

Floats = NDArray[np.float64]
Level = Literal["inside", "across"]
LEVELS: tuple[Level, ...] = ("inside", "across")
KINDS = ("exchange", "gather", "point", "point_alone")
SHARDED_KINDS = ("sharded_gather", "sharded_reduce")  # of FSDP2; a link may lack both
GIB = float(1 << 30)
# Speeds of each kind over that of one stream of a socket, between two emulated hosts of 4 H200 (NCCL 2.28 over TCP,
# 2.65 GB/s a slot; one layer's attention of 131,072 rows over 8: 150 ms under a2a, 199 under a2a+p2p, 236 under
# all_gather, 639 under p2p). A network with a card for each slot is assumed to give all kinds the same speed.
SOCKET_SPEEDS = {"exchange": 1.5, "gather": 1.0, "point": 0.7, "point_alone": 1.1}
# Speeds of each kind inside a host over that of messages from slot to slot, of H200s (bench/records/predictions.md).
INSIDE_SPEEDS = {"exchange": 7 / 9, "gather": 1.14}
SLOWEST_CARD = 10e9  # bytes a second and slot: a network that is slower goes through sockets, unless told otherwise


@cache
def _sample_columns(samples: tuple[tuple[float, float], ...]) -> tuple[Floats, Floats]:
    """Return the bytes and the seconds of samples as arrays, made once for each wire."""
    sizes, seconds = np.array(samples, dtype=np.float64).T
    return sizes, seconds


@dataclass(frozen=True)
class Wire:
    """Seconds of a message by its bytes: `samples` of (bytes, seconds), between which seconds rise evenly.

    >>> float(Wire.of(50e-6, 100e9).seconds(100e6))
    0.00105

    Beyond the last sample a byte takes what it took between the last two. Nothing takes no time. Raises PlanError for
    samples that do not rise.
    """

    samples: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Take the samples as numbers, and check them: bytes rise, seconds never fall, and at the end they rise.

        The last two samples give the bytes a second of all larger messages. Seconds of small messages may be equal.
        """
        samples = tuple((float(size), float(seconds)) for size, seconds in self.samples)
        object.__setattr__(self, "samples", samples)
        in_order = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(samples))
        rises_at_end = len(samples) > 1 and samples[-2][1] < samples[-1][1]
        good = all(math.isfinite(x) and x >= 0 for sample in samples for x in sample)
        if not (in_order and rises_at_end and good):
            raise PlanError(
                f"samples of a wire are {list(samples)}; give at least two pairs of (bytes, seconds), both rising"
            )

    @classmethod
    def fit(cls, samples: Sequence[tuple[float, float]]) -> "Wire":
        """Fit a wire to measured (bytes, seconds), where noise may make a longer message the faster one.

        >>> Wire.fit([(1e3, 2e-5), (1e4, 1e-5), (1e6, 1e-3)]).samples[0][1] < 2e-5
        True

        Neighbours that fall are replaced by their mean, in logarithms. If seconds do not rise at all, latency hides the
        bytes: all messages up to the longest take the mean, and longer ones as much more as they have more bytes.
        Raises PlanError without a sample of more than 0 bytes and seconds.
        """
        if not samples or min(min(sample) for sample in samples) <= 0:
            raise PlanError(f"measured samples of a wire are {list(samples)}; give pairs of (bytes, seconds) above 0")
        pools = list[list[tuple[float, float]]]()
        for sample in sorted(samples):
            pools.append([sample])
            while len(pools) > 1 and _pool_mean(pools[-2])[1] >= _pool_mean(pools[-1])[1]:
                pools[-2:] = [pools[-2] + pools[-1]]
        means = [_pool_mean(pool) for pool in pools]
        if len(means) > 1:
            return cls(tuple(means))
        longest, seconds = max(samples)[0], means[0][1]
        return cls(((longest, seconds), (2 * longest, 2 * seconds)))

    @classmethod
    def of(cls, seconds: float, bytes_per_second: float) -> "Wire":
        """Make a wire on which every message takes `seconds`, its latency, and the time of its bytes."""
        if not (seconds >= 0 and bytes_per_second > 0):
            raise PlanError(
                f"a wire of {seconds!r} s a message and {bytes_per_second!r} bytes/s; give a latency of at least 0 and "
                "a speed above 0"
            )
        return cls(((0.0, seconds), (GIB, seconds + GIB / bytes_per_second)))

    @property
    def latency(self) -> float:
        """Seconds of the shortest message."""
        return self.samples[0][1]

    @property
    def bytes_per_second(self) -> float:
        """The speed of long messages: bytes over seconds between the last two samples."""
        (small, first), (large, last) = self.samples[-2:]
        return (large - small) / (last - first)

    def seconds(self, size: ArrayLike) -> Floats:
        """Return the seconds of messages of `size` bytes, an array of the shape of `size`; 0 bytes take 0."""
        size = np.asarray(size, dtype=np.float64)
        sizes, seconds = _sample_columns(self.samples)
        beyond = np.maximum(size - sizes[-1], 0.0) / self.bytes_per_second
        within = np.asarray(np.interp(size, sizes, seconds), dtype=np.float64)
        return np.where(size > 0, within + beyond, 0.0)

    def scale_times(self, factor: float) -> "Wire":
        """Return a wire on which everything takes `factor` times as long."""
        return Wire(tuple((size, seconds * factor) for size, seconds in self.samples))


def _pool_mean(pool: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the geometric means of bytes and of seconds."""
    sizes, seconds = np.exp(np.log(np.array(pool)).mean(0)).tolist()
    return sizes, seconds


@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network, as a slot sees it; messages of each kind by what the slot sends or receives itself.

    `exchange`: every slot sends to every other. `gather`: all receive all rows. `point`: every slot of a host sends to
    one other slot; `point_alone`: only one slot of the host does. `sharded_gather` and `sharded_reduce`: parameters are
    gathered and gradients summed as FSDP2 does it, by what a slot receives or sends; None if they were not measured.
    Between hosts the bytes of a gather, and of these two, are divided by the slots of a host, through which all of them
    pass.
    """

    exchange: Wire
    gather: Wire
    point: Wire
    point_alone: Wire
    sharded_gather: Wire | None = None
    sharded_reduce: Wire | None = None

    @classmethod
    def of(cls, seconds: float, bytes_per_second: float, speeds: dict[str, float] | None = None) -> "Link":
        """Make a link of one latency in seconds and one speed; `speeds` are factors of the speed by kind (None: 1)."""
        return cls(**{kind: Wire.of(seconds, bytes_per_second * (speeds or {}).get(kind, 1.0)) for kind in KINDS})

    @classmethod
    def host_link(cls, seconds: float, bytes_per_second: float, network: str = "") -> "Link":
        """Make a link of this speed between hosts: through "sockets", or a "card" for each slot; "": by the speed."""
        if network not in ("", "sockets", "card"):
            raise PlanError(f"network is {network!r}; use 'sockets' or 'card' (one for each slot)")
        slow = network == "sockets" or (not network and bytes_per_second < SLOWEST_CARD)
        return cls.of(seconds, bytes_per_second, SOCKET_SPEEDS if slow else None)

    def scale_times(self, factor: float) -> "Link":
        """Return a link on which everything takes `factor` times as long."""
        return Link(**{kind: wire.scale_times(factor) for kind, wire in self.wires().items()})

    def wires(self) -> dict[str, Wire]:
        """Return the wires by kind, those of sharded parameters if they were measured."""
        return {kind: wire for kind in (*KINDS, *SHARDED_KINDS) if (wire := getattr(self, kind)) is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the samples of each kind, for a JSON document."""
        return {kind: [list(sample) for sample in wire.samples] for kind, wire in self.wires().items()}

    @classmethod
    def from_json(cls, values: Any) -> "Link":
        """Read a link from a JSON object. Raises PlanError for any other value."""
        kinds = set(cast(dict[str, Any], values)) if isinstance(values, dict) else set[str]()
        # Every one of KINDS must be there, and of SHARDED_KINDS both or none.
        if kinds - set(SHARDED_KINDS) != set(KINDS) or kinds & set(SHARDED_KINDS) not in (set(), set(SHARDED_KINDS)):
            raise PlanError(
                f"a link is an object with samples for each of {', '.join(KINDS)}, and for both or none of "
                f"{', '.join(SHARDED_KINDS)}; got {values!r}"
            )
        wires = cast(dict[str, Sequence[Sequence[float]]], values)
        try:
            samples = {kind: tuple((float(size), float(time)) for size, time in wires[kind]) for kind in wires}
        except (TypeError, ValueError) as error:
            raise PlanError(f"a link has samples that are no pairs of (bytes, seconds): {values!r}") from error
        return cls(**{kind: Wire(pairs) for kind, pairs in samples.items()})


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a machine as the attention of one model uses them: what `Cost` prices communication types by.

    `layers` attend, with `heads` query and `kv_heads` key/value heads on a rank. `key_share` is the share of keys and
    values in what is exchanged, `block_share` that of one turn of keys and values in a ring's bytes, forward and
    backward (the rest are gradients). A kernel reaches half its speed on pieces of `half_speed_rows`. `step_seconds` is
    what a batch of messages takes with the launches around it in one layer, however small it is and well it hides.
    """

    inside: Link
    across: Link
    layers: int
    heads: int
    kv_heads: int
    key_share: float
    block_share: float
    half_speed_rows: float = 0.0
    step_seconds: float = 0.0

    @property
    def gradient_share(self) -> float:
        """The share of the gradients of keys and values in a ring's bytes."""
        return 1 - 2 * self.block_share

    def sharding_speed(self, kind: str, *, inside: bool) -> float | None:
        """Return the bytes/s at which a slot gets sharded parameters (`kind` of `SHARDED_KINDS`); None if not measured.

        `inside` is whether all slots share a host; else the slower of the two levels counts, or the one across where
        hosts have one slot and so no link inside.
        """
        wire: Wire | None = getattr(self.inside if inside else self.across, kind)
        near: Wire | None = getattr(self.inside, kind)
        return None if wire is None else min(w.bytes_per_second for w in (wire, near) if w)

    def shared_by(self, tp: int) -> "Network":
        """Return the network as one of `tp` tensor-parallel ranks uses it, which has 1 / tp of the heads."""
        return dataclasses.replace(self, heads=max(1, self.heads // tp), kv_heads=max(1, self.kv_heads // tp))

    def scale_times(self, factor: float) -> "Network":
        """Return the network of a machine on which everything takes `factor` times as long."""
        links = {level: getattr(self, level).scale_times(factor) for level in LEVELS}
        return dataclasses.replace(self, **links, step_seconds=self.step_seconds * factor)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for a JSON document."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in LEVELS}
        return {level: getattr(self, level).to_json() for level in LEVELS} | values

    @classmethod
    def from_json(cls, values: Any) -> "Network":
        """Read a network from a JSON object. Raises PlanError for any other value."""
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(cast(dict[str, Any], values)) != names:
            raise PlanError(f"network of a cost is an object with {', '.join(sorted(names))}; got {values!r}")
        fields = cast(dict[str, Any], values)
        links: dict[str, Any] = {level: Link.from_json(fields[level]) for level in LEVELS}
        return cls(**fields | links)


def fewest_together(degree: Floats, inside: ArrayLike, node_size: int) -> Floats:
    """Return the slots of each group on the node where it has fewest, if all its nodes but the last are full.

    A group that would fit a node, but is not `inside` one, counts as one slot on each node.
    """
    on_last = np.where(degree % node_size, degree % node_size, node_size)
    return np.where(inside, degree, np.where(degree > node_size, on_last, 1.0))

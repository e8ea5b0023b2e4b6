"""The links of a machine: how long messages take inside a host and between hosts, by their bytes and kind."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import PlanError
from longspan.layout import Floats

Level = Literal["inside", "across"]
LEVELS: tuple[Level, ...] = ("inside", "across")
KINDS = ("exchange", "gather", "point")
# Speeds of each kind over that of one stream of a socket, between two emulated hosts of 4 H200 (NCCL 2.28 over TCP,
# 2.65 GB/s a slot; one layer's attention of 131,072 rows over 8: 150 ms under a2a, 199 under a2a+p2p, 236 under
# all_gather, 639 under p2p). A network with a card for each slot is assumed to give all kinds the same speed.
SOCKET_SPEEDS = {"exchange": 1.5, "gather": 1.0, "point": 0.7}
# Speeds of each kind inside a host over that of messages from slot to slot, of H200s (bench/records/predictions.md).
INSIDE_SPEEDS = {"exchange": 7 / 9, "gather": 1.14}
SLOWEST_CARD = 10e9  # bytes a second and slot: a network that is slower goes through sockets


@dataclass(frozen=True)
class Wire:
    """A message takes `latency` seconds and the time of its bytes; no bytes take no time."""

    latency: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bytes_per_second > 0):
            raise PlanError(
                f"a wire of {self.latency!r} s a message and {self.bytes_per_second!r} bytes/s; give a latency of at "
                "least 0 and a speed above 0"
            )

    def seconds(self, size: ArrayLike) -> Floats:
        """Return the seconds of messages of `size` bytes, an array of the shape of `size`."""
        size = np.asarray(size, dtype=np.float64)
        return np.where(size > 0, self.latency + size / self.bytes_per_second, 0.0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network, as a slot sees it: a wire for each kind of messages, priced by the bytes that the slot
    itself sends or receives.

    `exchange`: every slot sends to every other. `gather`: all receive all rows; between hosts the bytes are divided by
    the slots of a host, through which they pass together. `point`: every slot of a host sends to one other slot.
    """

    exchange: Wire
    gather: Wire
    point: Wire

    @classmethod
    def of(cls, seconds: float, bytes_per_second: float, speeds: dict[str, float] | None = None) -> "Link":
        """Make a link of one latency in seconds and one speed; `speeds` are factors of the speed by kind (None: 1)."""
        return cls(**{kind: Wire(seconds, bytes_per_second * (speeds or {}).get(kind, 1.0)) for kind in KINDS})

    def wires(self) -> dict[str, Wire]:
        return {kind: getattr(self, kind) for kind in KINDS}

    def to_json(self) -> dict[str, Any]:
        return {kind: [wire.latency, wire.bytes_per_second] for kind, wire in self.wires().items()}

    @classmethod
    def from_json(cls, values: Any) -> "Link":
        """Read a link from a JSON object. Raises PlanError for any other value."""
        try:
            pairs = {kind: (float(values[kind][0]), float(values[kind][1])) for kind in KINDS}
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"a link is an object with seconds of a message and bytes a second for each of {', '.join(KINDS)}; "
                f"got {values!r}"
            ) from error
        return cls(**{kind: Wire(*pair) for kind, pair in pairs.items()})


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a machine as the attention of one model uses them: what `Cost` prices communication types by.
    `layers` attend, with `heads` query and `kv_heads` key/value heads on a rank. `key_share` is the share of keys and
    values in what is exchanged, `block_share` that of one turn of keys and values in a ring's bytes (the rest are
    gradients). A kernel reaches half its speed on pieces of `half_speed_rows`. `step_seconds` is what a batch of
    messages takes with the launches around it in one layer, however small it is and well it hides. Choices of keys, and
    entries, add `forward_messages` and `backward_messages` of all layers to those of attention.
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
    forward_messages: float = 0.0
    backward_messages: float = 0.0

    @property
    def gradient_share(self) -> float:
        return 1 - 2 * self.block_share

    def point_seconds(self, size: Floats, inside: NDArray[np.bool_]) -> Floats:
        """Return the seconds of messages from slot to slot, `inside` a host or across."""
        return np.where(inside, self.inside.point.seconds(size), self.across.point.seconds(size))

    def exchange_seconds(self, size: Floats, members: Floats, together: Floats) -> Floats:
        """Return the seconds in which each of `members` sends `size` bytes to every other one, if `together` of them,
        or all, share its host, itself included; messages between hosts take place beside those inside.
        """
        near = np.minimum(together, members)
        near_seconds = self.inside.exchange.seconds(size * (near - 1))
        return np.maximum(near_seconds, self.across.exchange.seconds(size * (members - near)))

    def shared_by(self, tp: int) -> "Network":
        return dataclasses.replace(self, heads=max(1, self.heads // tp), kv_heads=max(1, self.kv_heads // tp))

    def to_json(self) -> dict[str, Any]:
        links = {level: getattr(self, level).to_json() for level in LEVELS}
        return links | {name: value for name, value in vars(self).items() if name not in LEVELS}

    @classmethod
    def from_json(cls, values: Any) -> "Network":
        """Read a network from a JSON object. Raises TypeError or KeyError for any other value."""
        return cls(**values | {level: Link.from_json(values[level]) for level in LEVELS})

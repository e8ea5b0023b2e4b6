"""What messages cost documents at the least, whatever groups they are in: the part of a bound that knows the links.

A group of d slots, each of which holds at most `cap` rows, waits for messages as `attention_price.py` describes. For
every type there is a time that grows evenly with the rows of the group and that it never takes less than. So each
document of a group can be charged its share, and a document of more rows than n − 1 slots hold is in a group of n slots
or more. It is charged the least of all types and degrees that are possible then. That no plan is charged more than it
takes is shown term by term:

- *Seconds that depend only on the group*, such as latencies: its slots together hold R ≤ d · cap rows. A document of L
  rows is charged L / cap of the seconds of one slot, all together R / cap ≤ d times.
- *Bytes that nothing hides*: a slot sends b · R / d bytes in a message, at most b · cap. On a wire, seconds over bytes
  of a message are nowhere less than at the ends of its pieces, so that L rows are charged L / cap of a message of
  b · cap bytes at the cheapest rate of any shorter message (`_full_seconds`).
- *Bytes that kernels hide*, W seconds behind C seconds: max(C, W) is at least any mixture (1 − s) · C + s · W, whose
  terms add up over documents. Shares s are those of `MIXTURES`.
- *More slots* never make a charge smaller: a ring of more members has more steps, and an exchange is charged the least
  of all wider ones.

It shares no code with the prices, so that a mistake in either shows as a plan that beats its bound.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.plan.cost.cost import Cost
from longspan.plan.cost.links import Network, Wire

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of traffic, in the longer of kernels and traffic
SLICED_EXCHANGE_BYTES = 64 << 20  # of a member's queries, from which on an exchange may go in two slices
SLICED_GATHER_BYTES = 128 << 20  # of the keys and values of all rows of a group, from which on a gather may


@dataclass(frozen=True)
class MessageBound:
    """The least that messages add to documents, on slots of at most `cap` rows in hosts of `node_size`.

    No group has more than `widest` slots.
    """

    cost: Cost
    network: Network
    cap: int
    node_size: int
    widest: int

    def slot_seconds(self, rows: Ints) -> float:
        """Return the slot seconds that documents of these rows take beyond their kernels, at least: of all together."""
        needed = np.maximum(-(-rows // self.cap), 1)
        if not (needed > 1).any():
            return 0.0
        length, shortest = rows.astype(np.float64), int(rows.min())
        inside, least = np.where(needed > 1, np.inf, 0.0), np.zeros((len(MIXTURES), len(rows)))
        for count in np.unique(needed).tolist():
            here = needed == count
            if count > 1:
                inside[here] = self._inside(count, shortest) * length[here]
            least[:, here] = self._across(max(count, 2), shortest, length[here])
        return max(0.0, *(math.fsum(seconds) for seconds in np.minimum(inside, least).tolist()))

    def _inside(self, fewest: int, shortest: int) -> float:
        """Return the seconds a row of a group of so many slots or more that share a host; infinite if none can."""
        if fewest > min(self.widest, self.node_size):
            return np.inf
        chosen, around = self._levels(fewest)
        rings = self._turn_seconds + self.cost.merge_seconds
        levels = self._swaps[0][chosen] + rings * (around - 1) + self._slower(around, shortest)
        return min(self._gather(fewest, shortest, crosses=False), levels.min(initial=np.inf))

    def _across(self, fewest: int, shortest: int, length: Floats) -> Floats:
        """Return the seconds of documents in groups of so many slots or more on several hosts.

        They are (shares of `MIXTURES`, documents), infinite if no group is so wide. Of r members of a ring each has the
        last of r blocks to compute when nothing travels, so that kernels hide only 1 − 1 / r of their time (all of it
        where slices of heads take turns). Of the rings that are wide enough the best is taken.
        """
        if fewest > self.widest:
            return np.full((len(MIXTURES), len(length)), np.inf)
        gather = np.broadcast_to(self._gather(fewest, shortest, crosses=True) * length, (len(MIXTURES), len(length)))
        chosen, fewest_around = self._levels(fewest)
        if not len(chosen):
            return gather
        share = np.array(MIXTURES)[:, None, None]  # (shares, types, documents)
        swap, wire = (x[None, :, None] for x in (self._swaps[1][chosen], self._wires(self._members[chosen])))
        least = fewest_around[None, :, None].astype(np.float64)
        kernels = self.cost.attention_seconds * length * (length + self.network.half_speed_rows)
        a_step = (self._turn_seconds + share * wire) * length
        around = least
        if not self._may_slice:
            around = np.maximum(least, np.sqrt(share * kernels / np.maximum(a_step, 1e-300)))
        hidden = share * kernels * (1 if self._may_slice else 1 - 1 / around)
        computed = (1 - share) * (self._slower(least, shortest) + self.cost.merge_seconds * (least - 1)) * length
        levels = (swap * length + a_step * (around - 1) + computed - hidden).min(axis=1)
        return np.minimum(gather, levels)

    def _levels(self, fewest: int) -> tuple[Ints, Ints]:
        """Return numbers of `_members`, and the least ring of sets of so many that is `fewest` slots wide or wider."""
        kind, members = self.cost.cp_comm_type, self._members
        wide = int(np.searchsorted(members, fewest))  # the first that needs no ring
        last = {"p2p": 1, "all_gather": 0}.get(kind, wide + 1)
        chosen = np.arange(len(members))[wide if kind == "a2a" else 0 : last]
        return chosen, -(-fewest // members[chosen])

    def _slower(self, around: ArrayLike, shortest: int) -> Floats:
        """Return the seconds a row by which kernels are slower on the pieces of such a ring than on whole documents."""
        pieces = np.minimum(np.asarray(around, dtype=np.float64), shortest)
        return self.network.half_speed_rows * self.cost.attention_seconds * (pieces - 1)

    @property
    def _turn_seconds(self) -> float:
        """The seconds a row of the messages of a step of a ring, however few bytes they carry."""
        return self.network.layers * self.network.step_seconds * self._turns / self.cap

    def _wires(self, exchanging: Ints) -> Floats:
        """Return the seconds a row of what a step of a ring between hosts sends, of sets that exchange heads."""
        across, copies = self.network.across, self._copies(exchanging)
        seconds = np.zeros(len(exchanging))
        for size in [*[self._block] * (2 if self._both else 1), *[self._gradients] * self._both]:
            wires = (self._full_seconds(wire, size * copies * self.cap) for wire in (across.point, across.point_alone))
            seconds += np.minimum(*wires)
        return self.network.layers * seconds / self.cap

    @property
    def _may_slice(self) -> bool:
        return self._queries * self.cap >= SLICED_EXCHANGE_BYTES

    def _gather(self, degree: int, shortest: int, crosses: bool) -> float:
        """Return the seconds a row of gathers over so many slots, or more."""
        if self.cost.cp_comm_type not in ("auto", "all_gather"):
            return np.inf
        whole = self._gather_seconds(degree, crosses, 1)
        wide = max(degree, int(-(-SLICED_GATHER_BYTES // (self._block * self.cap))) if self._block else degree)
        sliced = self._gather_seconds(wide, crosses, 2) if wide <= self.widest else np.inf
        return float(self._slower(degree, shortest)) + self.network.layers * min(whole, sliced) / self.cap

    def _gather_seconds(self, degree: int, crosses: bool, slices: int) -> float:
        """Return the seconds of a layer's gathers on a full slot, of which at least one slice is never hidden."""
        network, full = self.network, self.cap / slices
        received = self._block * (degree - 1) * full
        together = max(1, min(self.node_size, degree // 2)) if crosses else degree
        gather = float(self._full_seconds(network.inside.gather, received))
        if crosses:
            gather = max(gather, float(self._full_seconds(network.across.gather, received / self.node_size)))
        back = 0.0
        if self._both:
            near: Ints = np.arange(1 if crosses else together, together + 1)
            back = float(self._exchange(self._gradients * full * (near - 1), self._gradients * full * (degree - near)))
        return (2 if self._both else 1) * gather + back + slices * self._turns * network.step_seconds

    @cached_property
    def _members(self) -> Ints:
        """The members that may exchange heads, rising: those that divide the heads of a rank."""
        heads = self.cost.heads or self.network.heads
        members = np.arange(1, min(heads, self.widest) + 1)
        return members[heads % members == 0]

    @cached_property
    def _swaps(self) -> tuple[Floats, Floats]:
        """Seconds a row of exchanges among each of `_members` or more: inside a host, and where the group spans hosts.

        Infinite where a host has fewer slots.
        """
        inside, across = np.zeros((2, len(self._members)))
        for i, members in enumerate(map(int, self._members)):
            if members > 1:
                inside[i] = (
                    self._swap(members, np.arange(members, members + 1)) if members <= self.node_size else np.inf
                )
                across[i] = self._swap(members, np.arange(1, min(members, self.node_size) + 1))
        for seconds in (inside[1:], across[1:]):
            seconds[:] = np.minimum.accumulate(seconds[::-1])[::-1]
        return inside, across

    def _swap(self, members: int, near: Ints) -> float:
        """Return the seconds a row of exchanges among members of whom one of these numbers shares a host."""
        network, copies = self.network, float(self._copies(members))
        keys, summed = self._keys * copies, network.gradient_share / network.block_share if self._both else 1.0
        key_gradients = keys * (summed if copies > 1 else min(1.0, summed))
        sent = [self._queries + keys, self._queries]
        if self._both:
            sent += [self._queries, self._queries + key_gradients]
        seconds = np.inf
        for slices in (1, 2) if self._may_slice else (1,):
            full = self.cap / slices / members
            wires = sum(self._exchange(x * full * (near - 1), x * full * (members - near)) for x in sent)
            seconds = min(seconds, float(wires) + len(sent) * slices * network.step_seconds)
        return network.layers * seconds / self.cap

    def _exchange(self, near: ArrayLike, far: ArrayLike) -> float:
        """Return the seconds of bytes inside a host and of others between hosts, at the same time: the least."""
        network = self.network
        inside, across = (
            self._full_seconds(network.inside.exchange, near),
            self._full_seconds(network.across.exchange, far),
        )
        return float(np.maximum(inside, across).min())

    @staticmethod
    def _full_seconds(wire: Wire, size: ArrayLike) -> Floats:
        """Return the seconds of `size` bytes at the cheapest rate of any message of so many bytes or fewer."""
        size = np.asarray(size, dtype=np.float64)
        rate = np.where(size > 0, wire.seconds(size) / np.maximum(size, 1e-300), 0.0)
        for sample, seconds in wire.samples:
            if sample > 0:
                rate = np.where(size >= sample, np.minimum(rate, seconds / sample), rate)
        return rate * size

    def _copies(self, members: ArrayLike) -> Floats:
        """How often a key/value head is sent, at least: each member needs one."""
        return np.maximum(1.0, np.asarray(members, dtype=np.float64) / self.network.kv_heads)

    @property
    def _both(self) -> bool:
        return self.cost.passes != "forward"

    @property
    def _turns(self) -> int:
        """Messages of a step: a block forward; a block and gradients backward."""
        return 3 if self._both else 1

    @property
    def _block(self) -> float:
        """Bytes of a row's keys and values in a layer."""
        return self.cost.ring_bytes * (self.network.block_share if self._both else 1.0) / self.network.layers

    @property
    def _gradients(self) -> float:
        return self.cost.ring_bytes * self.network.gradient_share / self.network.layers if self._both else 0.0

    @property
    def _swap_bytes(self) -> float:
        return self.cost.exchange_bytes / self.network.layers / (2 if self._both else 1)

    @property
    def _queries(self) -> float:
        return (1 - self.network.key_share) / 2 * self._swap_bytes

    @property
    def _keys(self) -> float:
        return self.network.key_share * self._swap_bytes

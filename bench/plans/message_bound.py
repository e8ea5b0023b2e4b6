"""What messages cost documents at the least, whatever groups they are in: the part of a bound that knows the links.

A plan's own bound leaves messages of measured links out; `bound_with_messages` shows how much of the distance no plan
could avoid.

A group of d slots, each of which holds at most `cap` rows, waits for messages as `cost.py` describes. For
every type there is a time that grows evenly with the rows of the group and that it never takes less than. So each
document of a group can be charged its share, and a document of more rows than n − 1 slots hold is in a group of n slots
or more. It is charged the least of all types and degrees that are possible then. That no plan is charged more than it
takes is shown term by term:

- *Seconds that depend only on the group*, such as latencies: its slots together hold R ≤ d · cap rows. A document of L
  rows is charged L / cap of the seconds of one slot, all together R / cap ≤ d times.
- *Bytes that nothing hides*: a slot sends b · R / d bytes in a message, at most b · cap. Seconds over bytes of
  a message fall with its bytes, so that L rows are charged L / cap of a message of b · cap bytes.
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

from longspan.plan import Plan
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.links import Network
from longspan.plan.step_times import ROUNDING, lower_bound_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of traffic, in the longer of kernels and traffic
SLICED_EXCHANGE_BYTES = 64 << 20  # of a member's queries, from which on an exchange may go in two slices
SLICED_GATHER_BYTES = 128 << 20  # of the keys and values of all rows of a group, from which on a gather may


def bound_with_messages(plan: Plan, max_cp: int | None = None) -> float:
    """Return the seconds that no plan of these documents beats, messages of measured links among them."""
    cost = plan.cost
    slots = plan.slots
    cap = plan.max_tokens_per_slot
    assert cost.network is not None and cap is not None
    rows = np.asarray(plan.lengths, dtype=np.int64)
    widest = min(max_cp or slots, slots)
    own = lower_bound_seconds(rows.tolist(), slots, cap, cost, plan.mode, max_cp=widest, node_size=plan.node_size)
    messages = MessageBound(cost, cost.network, cap, plan.node_size, widest).slot_seconds(rows)
    area = own.area + messages / slots / cost.stages
    return max(area, own.longest) * (1 - ROUNDING) + cost.update_seconds


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
        """Return the least slot seconds that documents of these rows take, all together, beyond their kernels.

        Each document is charged the cheapest group that holds it, inside a host or over several. A group is charged one
        share of `MIXTURES` for all its documents, so that the sum is made for each share, and the largest is the bound.
        """
        needed = np.maximum(-(-rows // self.cap), 1)
        if not (needed > 1).any():
            return 0.0
        length = rows.astype(np.float64)
        shortest = int(rows.min())
        inside = np.where(needed > 1, np.inf, 0.0)
        across = np.zeros((len(MIXTURES), len(rows)))
        for fewest in np.unique(needed).tolist():
            documents = needed == fewest
            if fewest > 1:
                inside[documents] = self._inside_seconds(fewest, shortest) * length[documents]
            # A group over hosts has two slots at least. A document that fits one slot may be in it too, and is charged
            # less than 0 there if its kernels hide messages of others.
            across[:, documents] = self._across_seconds(max(fewest, 2), shortest, length[documents])
        return max(0.0, *(math.fsum(seconds) for seconds in np.minimum(inside, across).tolist()))

    def _inside_seconds(self, fewest: int, shortest: int) -> float:
        """Return the least seconds a row of a group of `fewest` slots or more that share a host; infinite if none can.

        The lesser of a gather and of two levels counts. Two levels take the exchange of heads, the latencies and the
        merging of a ring's steps, and what kernels lose on short pieces; a ring's bytes may all be hidden.
        """
        if fewest > min(self.widest, self.node_size):
            return np.inf
        inside, _ = self._least_exchange_seconds
        chosen, around = self._possible_levels(fewest)
        step_seconds = self._turn_seconds + self.cost.merge_seconds
        two_levels = inside[chosen] + step_seconds * (around - 1) + self._kernel_delay(around, shortest)
        return min(self._gather_row_seconds(fewest, shortest, crosses=False), two_levels.min(initial=np.inf))

    def _across_seconds(self, fewest: int, shortest: int, length: Floats) -> Floats:
        """Return the seconds of documents in groups of `fewest` slots or more on several hosts (MIXTURES, documents).

        They are the lesser of a gather's and of `_ring_seconds`, and infinite if no group is that wide.
        """
        if fewest > self.widest:
            return np.full((len(MIXTURES), len(length)), np.inf)
        gather = self._gather_row_seconds(fewest, shortest, crosses=True) * length
        chosen, fewest_around = self._possible_levels(fewest)
        if not len(chosen):
            return np.broadcast_to(gather, (len(MIXTURES), len(length)))
        return np.minimum(gather, self._ring_seconds(chosen, fewest_around, shortest, length))

    def _ring_seconds(self, chosen: Ints, fewest_around: Ints, shortest: int, length: Floats) -> Floats:
        """Return the seconds of documents on several hosts, under the best of these sets, as (MIXTURES, documents).

        `chosen` are sets that exchange heads (`_possible_levels`), and `fewest_around` are the members of the narrowest
        ring of each set. A ring of r members has (r − 1) · W seconds of messages beside C seconds of kernels, and the
        longer of both is at least (1 − s) · C + s · (r − 1) · W for a share s of `MIXTURES`. Each member computes the
        last of r blocks when nothing travels, so that kernels hide only (1 − 1 / r) · C of them (all of C where slices
        of heads take turns). So a wider ring has more messages, and hides more: s · C / r + (latency + s · W) · r is
        least at r = √(s · C / (latency + s · W)), and that r, or the narrowest ring if it is wider, is charged.
        """
        share = np.array(MIXTURES)[:, None, None]  # (shares, sets, documents)
        _, across = self._least_exchange_seconds
        exchange = across[chosen][None, :, None]
        wire = self._ring_wire_seconds(self._set_sizes[chosen])[None, :, None]
        narrowest = fewest_around[None, :, None].astype(np.float64)
        kernels = self.cost.attention_seconds * length * (length + self.network.half_speed_rows)
        step_seconds = (self._turn_seconds + share * wire) * length
        around = narrowest
        if not self._may_slice:
            around = np.maximum(narrowest, np.sqrt(share * kernels / np.maximum(step_seconds, 1e-300)))
        hidden = share * kernels * (1 if self._may_slice else 1 - 1 / around)
        slower = self._kernel_delay(narrowest, shortest) + self.cost.merge_seconds * (narrowest - 1)
        computed = (1 - share) * slower * length
        return (exchange * length + step_seconds * (around - 1) + computed - hidden).min(axis=1)

    def _possible_levels(self, fewest: int) -> tuple[Ints, Ints]:
        """Return the sets that may exchange heads in a group of `fewest` slots or more, and the narrowest ring of each.

        A set of e members is given by the index of e in `_set_sizes`, and needs a ring of ⌈fewest / e⌉. The first set
        that needs no ring is the last one tried, as wider sets are not cheaper. `a2a` tries that set only, `p2p` the
        set of one, and `all_gather` none.
        """
        kind = self.cost.cp_comm_type
        sizes = self._set_sizes
        wide = int(np.searchsorted(sizes, fewest))  # the first that needs no ring
        stop = {"p2p": 1, "all_gather": 0}.get(kind, wide + 1)
        chosen = np.arange(len(sizes))[wide if kind == "a2a" else 0 : stop]
        return chosen, -(-fewest // sizes[chosen])

    def _kernel_delay(self, around: ArrayLike, shortest: int) -> Floats:
        """Return the seconds a row by which kernels are slower on pieces than on whole documents, in rings of `around`.

        On pieces of 1 / r of a document they take half_speed_rows · attention_seconds · (r − 1) longer a row than on
        the whole. No piece is shorter than a row, so r counts as at most the rows of the `shortest` document.
        """
        pieces = np.minimum(np.asarray(around, dtype=np.float64), shortest)
        return self.network.half_speed_rows * self.cost.attention_seconds * (pieces - 1)

    @property
    def _turn_seconds(self) -> float:
        """Latency of the messages of a ring's step in all layers, in seconds for each row of a full slot."""
        return self.network.layers * self.network.step_seconds * self._turns / self.cap

    def _ring_wire_seconds(self, exchanging: Ints) -> Floats:
        """Return the seconds a row in which a ring's step sends its bytes between hosts, in all layers.

        `exchanging` are the members that exchange heads, by which keys are copied: one entry of the result for each. A
        block of keys and values goes round in each pass, gradients in backward. Whether one member of a host sends or
        all do is not known here, so the faster wire is charged.
        """
        across = self.network.across
        copies = self._copies(exchanging)
        seconds = np.zeros(len(exchanging))
        for size in (self._block, self._block, self._gradients) if self._has_backward else (self._block,):
            seconds += across.point.seconds(size * copies * self.cap)
        return self.network.layers * seconds / self.cap

    @property
    def _may_slice(self) -> bool:
        """Whether a full slot has so many bytes of queries that an exchange may go in slices."""
        return self._queries * self.cap >= SLICED_EXCHANGE_BYTES

    def _gather_row_seconds(self, degree: int, shortest: int, crosses: bool) -> float:
        """Return the least seconds a row of gathers over `degree` slots or more; infinite if no type is a gather.

        A gather goes in one piece, or in slices if its keys and values have `SLICED_GATHER_BYTES`: that takes `wide`
        slots, if they are full.
        """
        if self.cost.cp_comm_type not in ("auto", "all_gather"):
            return np.inf
        whole = self._gather_seconds(degree, crosses, 1)
        wide = max(degree, int(-(-SLICED_GATHER_BYTES // (self._block * self.cap))) if self._block else degree)
        sliced = self._gather_seconds(wide, crosses, 2) if wide <= self.widest else np.inf
        delay = float(self._kernel_delay(np.sqrt(degree), shortest))  # queries meet all keys
        return delay + self.network.layers * min(whole, sliced) / self.cap

    def _gather_seconds(self, degree: int, crosses: bool, slices: int) -> float:
        """Return the least seconds of a layer's gathers that a full slot waits: for one of `slices`, and all latencies.

        Kernels may hide the bytes of other slices. There is a gather in each pass and an exchange of gradients in
        backward. Where hosts are crossed, the slots of a host share what their host receives; how many slots share a
        host is not known, so the number with the least seconds counts.
        """
        network = self.network
        rows = self.cap
        received = self._block * (degree - 1) * rows
        most_together = max(1, min(self.node_size, degree // 2)) if crosses else degree  # on the host with fewest slots
        gather = float(network.inside.gather.seconds(received))
        if crosses:
            gather = max(gather, float(network.across.gather.seconds(received / self.node_size)))
        back = 0.0
        if self._has_backward:
            near: Ints = np.arange(1 if crosses else most_together, most_together + 1)
            back = self._exchange_seconds(self._gradients * rows * (near - 1), self._gradients * rows * (degree - near))
        whole = (2 if self._has_backward else 1) * gather + back
        return whole / slices + self._turns * network.step_seconds

    @cached_property
    def _set_sizes(self) -> Ints:
        """How many members may exchange heads, rising: numbers that divide the heads of a rank."""
        heads = self.cost.heads or self.network.heads
        sizes = np.arange(1, min(heads, self.widest) + 1)
        return sizes[heads % sizes == 0]

    @cached_property
    def _least_exchange_seconds(self) -> tuple[Floats, Floats]:
        """Least seconds a row of exchanges in sets of each size or wider: inside a host, and in groups across hosts.

        Inside a host they are infinite for sets that are wider than a host.
        """
        inside, across = np.zeros((2, len(self._set_sizes)))
        for i, members in enumerate(map(int, self._set_sizes)):
            if members > 1:
                fits_host = members <= self.node_size
                most_near = min(members, self.node_size)
                inside[i] = self._exchange_row_seconds(members, np.array([members])) if fits_host else np.inf
                across[i] = self._exchange_row_seconds(members, np.arange(1, most_near + 1))
        for seconds in (inside[1:], across[1:]):  # without the set of one, which exchanges nothing
            seconds[:] = np.minimum.accumulate(seconds[::-1])[::-1]
        return inside, across

    def _exchange_row_seconds(self, members: int, near: Ints) -> float:
        """Return the least seconds a row of exchanges among members, of whom any number in `near` may share a host.

        Each of e members sends 1 / e of its queries, keys and values to every other and gets as much of outputs back,
        and of their gradients in backward. Key/value heads fewer than members are copied, and the gradients of copies
        are summed, in a wider type. Slices make messages shorter and latencies more: the faster way counts.
        """
        network = self.network
        copies = float(self._copies(members))
        keys = self.network.key_share * self._exchange_bytes * copies  # bytes of a row's keys and values
        widened = network.gradient_share / network.block_share if self._has_backward else 1.0
        # Where `copies` is 1, more may be made, whose gradients are summed in another type: the narrower type counts.
        key_gradients = keys * (widened if copies > 1 else min(1.0, widened))
        sent = [self._queries + keys, self._queries]
        if self._has_backward:
            sent += [self._queries, self._queries + key_gradients]
        seconds = np.inf
        for slices in (1, 2) if self._may_slice else (1,):
            rows = self.cap / members
            wires = sum(
                self._exchange_seconds(size * rows * (near - 1), size * rows * (members - near)) for size in sent
            )
            seconds = min(seconds, float(wires) / slices + len(sent) * network.step_seconds)
        return network.layers * seconds / self.cap

    def _exchange_seconds(self, near: ArrayLike, far: ArrayLike) -> float:
        """Return the seconds of an exchange whose members are placed on hosts in the best of several ways.

        In each way a member sends the bytes `near` inside its host and, at the same time, `far` to other hosts.
        """
        network = self.network
        inside = network.inside.exchange.seconds(near)
        across = network.across.exchange.seconds(far)
        return float(np.maximum(inside, across).min())

    def _copies(self, members: ArrayLike) -> Floats:
        """Return how often a key/value head is sent at least, by `members`: each member needs at least one head."""
        return np.maximum(1.0, np.asarray(members, dtype=np.float64) / self.network.kv_heads)

    @property
    def _has_backward(self) -> bool:
        return self.cost.passes != "forward"

    @property
    def _turns(self) -> int:
        """Messages of a step of a ring: a block in the forward pass; a block and gradients in the backward pass."""
        return 3 if self._has_backward else 1

    @property
    def _block(self) -> float:
        """Bytes of a row's keys and values in a layer."""
        return self.cost.ring_bytes * (self.network.block_share if self._has_backward else 1.0) / self.network.layers

    @property
    def _gradients(self) -> float:
        """Bytes of the gradients of a row's keys and values in a layer, in backward."""
        return self.cost.ring_bytes * self.network.gradient_share / self.network.layers if self._has_backward else 0.0

    @property
    def _exchange_bytes(self) -> float:
        """Bytes of a row's queries, outputs, keys and values that a layer exchanges in one pass."""
        return self.cost.exchange_bytes / self.network.layers / (2 if self._has_backward else 1)

    @property
    def _queries(self) -> float:
        """Bytes of a row's queries in a layer, and of its outputs."""
        return (1 - self.network.key_share) / 2 * self._exchange_bytes

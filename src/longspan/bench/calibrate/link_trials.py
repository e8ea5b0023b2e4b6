"""Messages of every kind on each level of the network, as they are sent in a run, and the hosts that they tell apart.

All hosts are timed at once. They are those of the launcher, `node_size` neighbouring slots each. Sizes are what
`links.Link` counts: the bytes that a slot sends or receives itself.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longspan.bench.calibrate.boundary import (
    Boundary,
    check_boundary,
    contradicts_launcher,
    launcher_hosts,
    measure_steady_boundary,
)
from longspan.bench.calibrate.fit import Sample
from longspan.bench.calibrate.trial import Clock, Trial
from longspan.comm import World
from longspan.comm.groups.channel import Channel
from longspan.layout import Layout
from longspan.plan import plan_fixed
from longspan.plan.cost.links import Level

GPU_SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
CPU_SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 20)
SHORT, LONG = 4, 1 << 20  # bytes of the messages by which hosts are told apart
PAIR_REPEATS = 9  # of such a message between two slots; the median counts
TURNS = {1 << 18: 16, 1 << 22: 4}  # how often messages of at most so many bytes are sent in a row; longer ones once

# torch 2.13 renamed these two.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def message_sizes(sizes: Sequence[int]) -> list[tuple[int, bool]]:
    """List sizes of messages in bytes, each with whether the wires are fitted to it.

    The further sizes test the fit: geometric means of neighbours, in multiples of 64 bytes, aligned as the given sizes
    are. None lies between the two smallest, whose messages take mostly latency.
    """
    between = [round((a * b) ** 0.5) // 64 * 64 for a, b in pairwise(sizes[1:])]
    return sorted([*((size, True) for size in sizes), *((size, False) for size in between)])


def find_hosts(world: World, clock: Clock) -> str:
    """Find which ranks share a host, and return a line about the hosts. Raises CommError if the launcher has others.

    Hosts are told apart by the latency of short messages or, if that is about the same everywhere or contradicts the
    launcher, by the seconds of longer messages.
    """
    slots, node_size = world.home.slots, world.node_size
    boundary = Boundary(())
    for size in (SHORT, LONG):
        measure = partial(clock.time_pairs, run=exchange_call(world, size), repeats=PAIR_REPEATS)
        measured = measure_steady_boundary(slots, node_size, measure)
        boundary = measured if measured.hosts else boundary
        if boundary.hosts and not contradicts_launcher(boundary, slots, node_size):
            break
    return check_boundary(boundary, slots, node_size)


class LinkTrials:
    """The messages between the slots of a world; made and run by all ranks together."""

    def __init__(self, world: World, sizes: Sequence[int]) -> None:
        """Find the slots of this host, and open the communicators; `sizes` are bytes of messages, rising."""
        self.world: World = world
        self.sizes: list[tuple[int, bool]] = message_sizes(sizes)
        self.node_size: int = world.node_size
        slots = world.home.slots
        self.hosts: tuple[tuple[int, ...], ...] = launcher_hosts(slots, self.node_size)
        self.host: tuple[int, ...] = self.hosts[world.slot // self.node_size]
        self.hosts_are_equal: bool = len({len(host) for host in self.hosts}) == 1  # in their number of slots
        # Communicators, as runs of these degrees have them; hosts of different sizes are no groups of one degree.
        for degree in {len(self.host) if self.hosts_are_equal else 1, slots}:
            world.prepare(plan_fixed([degree] * (slots // degree), world.home, degree))

    def list_trials(self) -> list[Trial]:
        """List the trials of every kind and size of message, on each level of the network that there is."""
        trials: list[Trial] = []
        if max(map(len, self.hosts)) > 1:
            trials += self._slot_trials()
        if len(self.hosts) > 1:
            trials += self._host_trials()
        return trials

    def _slot_trials(self) -> Iterator[Trial]:
        """Yield the trials of messages between the slots of one host, for each host at the same time.

        An exchange or gather of `size` bytes divides them between the width − 1 other slots. In `point` every slot
        sends to the next, in `point_alone` only the first two slots to each other: a message may be faster while the
        other slots are silent.
        """
        host, channels = self.host, self.world.channels
        host_channel = channels.find_channel(host)
        pair = channels.find_channel(host[:2]) if self.world.slot in host[:2] and len(host) > 1 else None
        width = self.node_size
        yield from self._size_trials(
            "inside", "exchange", lambda size: self._exchange_call(host_channel, size // (width - 1), set(host))
        )
        yield from self._size_trials(
            "inside", "gather", lambda size: self._gather_call(host_channel, size // (width - 1))
        )
        yield from self._size_trials("inside", "point", lambda size: self._shift_call(host_channel, size))
        yield from self._size_trials("inside", "point_alone", lambda size: self._shift_call(pair, size))
        if self.hosts_are_equal:  # each host is a replica of a home, and replicas have as many slots
            home = Layout(self.world.home.slots, dp_replicate=len(self.hosts))
            yield from self._sharded_trials("inside", self.world.open_inner(home), width, 1)

    def _host_trials(self) -> Iterator[Trial]:
        """Yield the trials of messages between hosts.

        All slots gather, and exchange with those of other hosts. In `point` each slot sends to the slot at its place in
        the next host, in `point_alone` only the first slot of each host sends. The size of an exchange is divided
        between the slots of other hosts. The size of a gather is a slot's share of what arrives at its host, so that
        each slot receives `host_slots` times the size. Where hosts differ, both sizes are those of the smallest host.
        """
        world, hosts, slots = self.world, self.hosts, self.world.home.slots
        everyone = world.channels.find_channel(range(slots))
        slots_elsewhere = set(range(slots)) - set(self.host)
        place, host_slots = world.slot % self.node_size, min(map(len, hosts))
        slots_in_same_place = [host[place] for host in hosts if len(host) > place]
        place_channel = world.channels.find_channel(slots_in_same_place) if len(slots_in_same_place) > 1 else None
        first_channel = place_channel if place == 0 else None
        block_size = lambda size: size // (slots - host_slots)  # noqa: E731
        yield from self._size_trials(
            "across", "exchange", lambda size: self._exchange_call(everyone, block_size(size), slots_elsewhere)
        )
        yield from self._size_trials(
            "across", "gather", lambda size: self._gather_call(everyone, size * host_slots // (slots - 1))
        )
        yield from self._size_trials("across", "point", lambda size: self._shift_call(place_channel, size))
        yield from self._size_trials("across", "point_alone", lambda size: self._shift_call(first_channel, size))
        yield from self._sharded_trials("across", world, slots, host_slots)

    def _sharded_trials(self, level: Level, world: World, width: int, host_slots: int) -> Iterator[Trial]:
        """Yield trials of FSDP2's collectives on its mesh's group: bfloat16 parameters, float32 gradients.

        `width` slots shard the parameters, and `host_slots` of these share the links of a host (1: inside a host, where
        each has its own). A size is a slot's share of what arrives at its host, so that each slot receives `host_slots`
        times the size.
        """
        group = world.meshes.fsdp.get_group("slots")
        shard_bytes = lambda size: size * host_slots // (width - 1)  # noqa: E731
        yield from self._size_trials(
            level, "sharded_gather", lambda size: self._parameter_gather_call(group, width, shard_bytes(size))
        )
        yield from self._size_trials(
            level, "sharded_reduce", lambda size: self._gradient_reduce_call(group, width, shard_bytes(size))
        )

    def _size_trials(self, level: Level, kind: str, make: Callable[[int], Callable[[], object]]) -> Iterator[Trial]:
        """Yield a trial of one kind of message for each size; `make` gives the call to time, of a size in bytes."""
        for size, fitted in self.sizes:
            turns = next((count for limit, count in TURNS.items() if size <= limit), 1)
            name = f"{kind.replace('_', ' ')} {level}: {size:,} bytes"
            sample = Sample(part="link", name=name, level=level, kind=kind, bytes=float(size), fitted=fitted)
            yield Trial(sample, make(size), turns)

    def _exchange_call(self, channel: Channel, block: int, partners: set[int]) -> Callable[[], object]:
        """Return a call that sends `block` bytes to each partner but this slot, and receives as much from each.

        Other members of the channel enter the call as well, with no bytes.
        """
        slots = [self.world.home.coordinates(rank).slot for rank in channel.ranks]
        rows = [block if slot in partners - {self.world.slot} else 0 for slot in slots]
        x = self._byte_buffer(sum(rows))
        return lambda: channel.all_to_all_rows(x, rows, rows, "bench calibrate").wait()

    def _gather_call(self, channel: Channel, block: int) -> Callable[[], object]:
        """Return a call in which each member of a channel sends `block` bytes (at least one) to all other members."""
        x = self._byte_buffer(max(1, block))
        return lambda: channel.all_gather(x, [len(x)] * channel.degree, "bench calibrate").wait()

    def _shift_call(self, channel: Channel | None, size: int) -> Callable[[], object]:
        """Return a call that sends `size` bytes to the next member of a channel; nothing without another member."""
        if channel is None or channel.degree == 1:
            return lambda: None
        x, into = self._byte_buffer(size), self._byte_buffer(size)
        return lambda: channel.shift(x, into, "bench calibrate").wait()

    def _parameter_gather_call(self, group: ProcessGroup, width: int, block: int) -> Callable[[], object]:
        """Return a call that gathers shards of `block` bytes of `width` slots, in bfloat16."""
        shard = torch.zeros(max(1, block // 2), dtype=torch.bfloat16, device=self.world.device)
        whole = shard.new_empty(len(shard) * width)
        return lambda: _gather(whole, shard, group=group)

    def _gradient_reduce_call(self, group: ProcessGroup, width: int, block: int) -> Callable[[], object]:
        """Return a call that sums gradients over `width` slots and leaves `block` bytes of them on each, in float32."""
        shard = torch.zeros(max(1, block // 4), dtype=torch.float32, device=self.world.device)
        whole = shard.new_zeros(len(shard) * width)
        return lambda: _reduce(shard, whole, group=group)

    def _byte_buffer(self, size: int) -> Tensor:
        """Make a message of `size` bytes on the device."""
        return torch.zeros(size, dtype=torch.uint8, device=self.world.device)


def exchange_call(world: World, size: int) -> Callable[[int], object]:
    """Return a call that exchanges a message of this size with another slot, for `Clock.time_pairs`."""
    channel = world.channels.find_channel(range(world.home.slots))
    x = torch.zeros(size, dtype=torch.uint8, device=world.device)
    into = torch.empty_like(x)
    return lambda other: channel.exchange([(other, x)], [(other, into)], "bench calibrate").wait()

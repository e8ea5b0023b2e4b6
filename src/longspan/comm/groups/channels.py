"""The channels of an open world, on which ranks talk on their device, and the communicators behind them.

Every group is made by all ranks together, in one order: those with a name when they are first used, those of
plans in `make_communicators`, a bounded number. What ranks tell each other on the host is in `control_group`.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from longspan.comm.groups.channel import Channel
from longspan.comm.groups.meshes import Meshes
from longspan.comm.groups.process_groups import ProcessGroups
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.layout.layout import excerpt
from longspan.plan import Plan


class CommunicatorChoice:
    """Chooses, plan after plan, the slots that get a communicator, at most `max_groups` for each slot.

    A group gains one where it recurs: where all groups of its plan have one degree (the fixed degrees of training and
    evaluation), or where it has been in two micro-batches so far. Order of slots does not matter: torch sorts ranks.
    """

    def __init__(self, max_groups: int) -> None:
        """Begin without communicators; groups are tuples of slots in ascending order."""
        self.max_groups = max_groups
        self._seen: Counter[tuple[int, ...]] = Counter()  # how many micro-batches had these slots as a group
        self._chosen: set[tuple[int, ...]] = set()
        self._load: Counter[int] = Counter()  # communicators per slot

    def choose_groups(self, plan: Plan) -> list[tuple[int, ...]]:
        """Choose the groups that get communicators of their own now: slots, ascending in each, in plan order.

        A group is chosen if it may gain from one, and if this is its second micro-batch at least, in this plan or with
        earlier ones, or all groups of this plan have one degree.
        """
        groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups if group.degree > 1]
        one_degree = len({group.degree for group in groups}) == 1
        candidates = [slots for group in groups if self._may_gain(slots := tuple(sorted(group.slots)))]
        self._seen.update(candidates)
        chosen_groups: list[tuple[int, ...]] = []
        for slots in dict.fromkeys(candidates):  # one that was chosen may have taken the room of the next
            if self._may_gain(slots) and (one_degree or self._seen[slots] > 1):
                chosen_groups.append(slots)
                self._chosen.add(slots)
                self._load.update(slots)
                del self._seen[slots]
        return chosen_groups

    def _may_gain(self, slots: tuple[int, ...]) -> bool:
        """Return whether these slots lack a communicator and each has room for one more; none is ever given up."""
        return slots not in self._chosen and all(self._load[slot] < self.max_groups for slot in slots)


class Channels:
    """The channels of one rank, `world.channels`: between slots of its plane, and along the axes of its home.

    >>> world.channels.find_channel((0, 1)).all_gather(x, counts, "gather of x").wait()
    """

    def __init__(
        self, home: Layout, rank: int, device: torch.device, groups: ProcessGroups, meshes: Meshes, max_groups: int
    ) -> None:
        """Begin without channels, which are made at first use; `_place` are the rank's coordinates in the home."""
        self._home, self._rank, self._device, self._groups, self._meshes = home, rank, device, groups, meshes
        self._place = home.coordinates(rank)
        self._plane = home.plane(pp=self._place.pp, tp=self._place.tp)
        self._choice = CommunicatorChoice(max_groups)
        self._by_slots: dict[tuple[int, ...], Channel] = {}

    def find_channel(self, slots: Sequence[int]) -> Channel:
        """Return the channel of these slots.

        Raises CommError where they are not distinct slots of the home, or this rank's slot is not one of them.
        """
        slots = tuple(slots)
        if slots not in self._by_slots:
            if not slots or len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= self._home.slots:
                raise CommError(
                    f"{excerpt(slots)} are not distinct slots of the home, which has slots 0 to {self._home.slots - 1}"
                )
            slot = self._place.slot
            if slot not in slots:
                raise CommError(f"rank {self._rank} is slot {slot}, which is not a member of slots {excerpt(slots)}")
            ranks = tuple(self._plane[slot] for slot in slots)
            self._by_slots[slots] = Channel(self._groups, ranks, slots.index(slot), self._device)
        return self._by_slots[slots]

    @cached_property
    def pipeline(self) -> Channel:
        """Return the channel of this slot's pipeline stages, first to last; first used by all ranks together.

        Raises CommError for a home whose ranks descend along its stages: torch orders the members of a group by rank.
        """
        pipelines = self._home.pp_groups()
        if descending := next((ranks for ranks in pipelines if sorted(ranks) != list(ranks)), None):
            raise CommError(
                f"the home's ranks {excerpt(descending)} descend along its pipeline stages, but torch orders the "
                "members of a group by rank; with pp, give the home its ranks in ascending order"
            )
        self._groups.make_parent("pipeline", pipelines, "pipeline")
        ranks = next(ranks for ranks in pipelines if self._rank in ranks)
        channel = Channel(self._groups, ranks, ranks.index(self._rank), self._device, "pipeline")
        self._warm_up_channel(channel)
        return channel

    @cached_property
    def tp(self) -> Channel:
        """Return the channel of this slot's tensor-parallel ranks; first used by all ranks together.

        Its group is that of `meshes.tp`. Raises CommError for a home without tensor parallelism.
        """
        self._groups.set_parent("tp", self._meshes.tp.get_group())
        place = self._place
        ranks = tuple(self._home.rank_at(place.slot, pp=place.pp, tp=tp) for tp in range(self._home.tp))
        return Channel(self._groups, ranks, place.tp, self._device, "tp")

    @cached_property
    def everyone(self) -> Channel:
        """Return a channel over all ranks of the home, in its order; first used by all ranks together.

        With more than one plane it makes a group of its own.
        """
        home = self._home
        if self._plane == home.ranks:
            return self.find_channel(range(home.slots))
        self._groups.make_parent("everyone", [home.ranks], "everyone")
        channel = Channel(self._groups, home.ranks, home.ranks.index(self._rank), self._device, "everyone")
        self._warm_up_channel(channel)
        return channel

    @cached_property
    def hosts(self) -> Channel:
        """Return a channel over all ranks of the home, in its order, for arrays of the host: gloo, point to point."""
        ranks = self._home.ranks
        return Channel(self._groups, ranks, ranks.index(self._rank), torch.device("cpu"), "control")

    def make_parents(self) -> None:
        """Make the groups on which the slots of every plane talk point to point; entered by all ranks."""
        self._groups.make_parent("plane", self._home.planes(), "parent")
        self._warm_up_channel(self.find_channel(range(self._home.slots)))

    def connect_pairs(self) -> None:
        """Let every two slots of a plane exchange a number: NCCL connects two ranks at their first message, slowly."""
        channel = self.find_channel(range(self._home.slots))
        other_members = [index for index in range(channel.degree) if index != channel.index]
        if self._device.type == "cuda" and other_members:
            x = torch.zeros(1, device=self._device)
            channel.exchange(
                [(i, x) for i in other_members], [(i, x.clone()) for i in other_members], "connecting pairs"
            ).wait()
            torch.cuda.synchronize(self._device)

    def make_communicators(self, plan: Plan) -> None:
        """Make communicators for the groups of this plan that gain from one and lack it; entered by all ranks."""
        for slots in self._choice.choose_groups(plan):
            for plane in self._home.planes():
                ranks = tuple(plane[slot] for slot in slots)
                group = self._groups.make_group(ranks, "communicator")
                if group is not None:
                    self._groups.add_communicator(ranks, group)
                    self._warm_up_group(group, ranks)

    def _warm_up_channel(self, channel: Channel) -> None:
        """Have NCCL connect the members: by a collective of the parent group, and an exchange with both neighbours."""
        self._warm_up_group(channel.group, channel.ranks)
        if self._device.type == "cuda" and channel.degree > 1:
            x = torch.zeros(1, device=self._device)
            next_member, previous_member = (channel.index + 1) % channel.degree, (channel.index - 1) % channel.degree
            channel.exchange([(next_member, x)], [(previous_member, x.clone())], "warming point-to-point").wait()
            torch.cuda.synchronize(self._device)

    def _warm_up_group(self, group: ProcessGroup, ranks: Sequence[int]) -> None:
        """Have NCCL run a group's first collective, after which any of its members may talk point to point."""
        if self._device.type == "cuda":
            with self._groups.watch.during("warming a communicator", ranks):
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
                torch.cuda.synchronize(self._device)

"""How the ranks of an open world talk on the device: channels, device meshes, and the communicators behind them.

Every group is made by all ranks together, in one order: those that are asked for by name when they first are, those of
plans in `prepare`. What ranks tell each other on the host is in `host`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from longspan.comm.groups.channel import Channel
from longspan.comm.groups.communicator_choice import CommunicatorChoice
from longspan.comm.groups.groups import GroupRecord, Groups
from longspan.comm.groups.meshes import Meshes
from longspan.comm.host_values import HostValues
from longspan.errors import CommError
from longspan.layout import Coordinates
from longspan.layout.layout import short
from longspan.plan import Plan


class Channels(HostValues):
    """What a `World` offers for talking on its device."""

    key: int
    rank: int
    coordinates: Coordinates
    slot: int
    device: torch.device
    _groups: Groups
    _meshes: Meshes
    _choice: CommunicatorChoice
    _channels: dict[tuple[int, ...], Channel]

    @property
    def plane_group(self) -> ProcessGroup:
        """The group over this rank's plane, on which its channels talk point to point."""
        self.check_open()
        return self._groups.parent("plane")

    @property
    def groups_made(self) -> list[GroupRecord]:
        """Every communicator that this rank is in, with what it is for and the seconds that it took to make."""
        self.check_open()
        return list(self._groups.made)

    def channel(self, slots: Sequence[int]) -> Channel:
        """How these slots talk in this rank's plane. Raises CommError where this rank's slot is not one of them."""
        slots = tuple(slots)
        if slots not in self._channels:
            self.check_open()
            if not slots or len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= self.home.slots:
                raise CommError(
                    f"{short(slots)} are not distinct slots of the home, which has slots 0 to {self.home.slots - 1}"
                )
            if self.slot not in slots:
                raise CommError(f"rank {self.rank} is slot {self.slot}, which is not a member of slots {short(slots)}")
            ranks = tuple(self.plane[slot] for slot in slots)
            self._channels[slots] = Channel(self._groups, ranks, slots.index(self.slot), self.device)
        return self._channels[slots]

    @cached_property
    def pipeline(self) -> Channel:
        """This slot's pipeline stages, first to last, on a group of their own; first asked for by all ranks together.

        Raises CommError for a home whose ranks descend along its stages: torch orders the members of a group by rank.
        """
        self.check_open()
        pipelines = self.home.pp_groups()
        if descending := next((ranks for ranks in pipelines if sorted(ranks) != list(ranks)), None):
            raise CommError(
                f"the home's ranks {short(descending)} descend along its pipeline stages, but torch orders the members "
                "of a group by rank; with pp, give the home its ranks in ascending order"
            )
        for ranks in pipelines:
            group = self._groups.make(ranks, "pipeline")
            if group is not None:
                self._groups.set_parent("pipeline", group)
        own = next(ranks for ranks in pipelines if self.rank in ranks)
        channel = Channel(self._groups, own, own.index(self.rank), self.device, "pipeline")
        self._warm(self._groups.parent("pipeline"), own, channel)
        return channel

    @property
    def pp_group(self) -> ProcessGroup:
        """The group of `pipeline`, for torch's pipelining; first asked for by all ranks together."""
        _ = self.pipeline
        return self._groups.parent("pipeline")

    @cached_property
    def tp_channel(self) -> Channel:
        """This slot's tensor-parallel ranks, on the group of `meshes.tp`; first asked for by all ranks together.

        Raises CommError for a home without tensor parallelism.
        """
        self._groups.set_parent("tp", self.tp_mesh.get_group())
        place = self.coordinates
        ranks = tuple(self.home.rank_at(place.slot, pp=place.pp, tp=tp) for tp in range(self.home.tp))
        return Channel(self._groups, ranks, place.tp, self.device, "tp")

    @cached_property
    def everyone(self) -> Channel:
        """A channel over all ranks of the home, in its order; first asked for by all ranks together.

        With more than one plane it makes a group of its own.
        """
        self.check_open()
        if self.plane == self.home.ranks:
            return self.channel(range(self.home.slots))
        group = self._groups.make(self.home.ranks, "everyone")
        assert group is not None
        self._groups.set_parent("everyone", group)
        index = self.home.ranks.index(self.rank)
        channel = Channel(self._groups, self.home.ranks, index, self.device, "everyone")
        self._warm(group, self.home.ranks, channel)
        return channel

    @property
    def meshes(self) -> Meshes:
        """Device meshes of this rank's pipeline stage for FSDP2 and DTensor: `.fsdp`, `.tp`, `.expert`, `.ep`."""
        self.check_open()
        return self._meshes

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """`meshes.fsdp`: axis "slots", or "replicate" × "slots"; first asked for by all ranks together."""
        return self.meshes.fsdp

    @property
    def tp_mesh(self) -> DeviceMesh:
        """`meshes.tp`: the tensor-parallel ranks of this slot."""
        return self.meshes.tp

    @property
    def expert_mesh(self) -> DeviceMesh:
        """`meshes.expert`: FSDP2's mesh of expert parameters, all ranks of a stage that hold the same ones."""
        return self.meshes.expert

    @property
    def ep_mesh(self) -> DeviceMesh:
        """`meshes.ep`: the neighbouring slots that this rank shares its experts with."""
        return self.meshes.ep

    def prepare(self, plan: Plan) -> None:
        """Make the communicators of their own that this plan's groups gain from and lack; entered by all ranks.

        Those are the groups of a plan whose groups all have one degree, and groups that recur in the micro-batches of
        the plans prepared so far, up to `max_groups` for each slot; all others talk point to point on the plane's
        group. Raises CommError where ranks hold different plans or the plan is for another number of slots.
        """
        if plan.slots != self.home.slots:
            raise CommError(f"the plan is for {plan.slots} slots, the home has {self.home.slots}; plan for this home")
        self.agree(plan.digest())
        for slots in self._choice.choose(plan):
            for plane in self.home.planes():
                ranks = tuple(plane[slot] for slot in slots)
                group = self._groups.make(ranks, "communicator")
                if group is not None:
                    self._groups.add_communicator(ranks, group)
                    self._warm(group, ranks)

    def _warm(self, group: ProcessGroup, ranks: Sequence[int], neighbours: Channel | None = None) -> None:
        """NCCL: every member enters the first collective, after which any subset may talk point to point."""
        if self.device.type != "cuda":
            return
        with self.watch.during("warming a communicator", ranks):
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.synchronize(self.device)
        if neighbours is not None and neighbours.degree > 1:
            channel, x = neighbours, torch.zeros(1, device=self.device)
            right, left = (channel.index + 1) % channel.degree, (channel.index - 1) % channel.degree
            channel.exchange([(right, x)], [(left, x.clone())], "warming point-to-point").wait()
            torch.cuda.synchronize(self.device)

    @abstractmethod
    def check_open(self) -> None:
        """Raise CommError where this world has not been opened or has been left."""

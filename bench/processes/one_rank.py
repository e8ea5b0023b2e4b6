"""A world of one process: rank 0 of any home, on torch's `fake` process group, whose exchanges complete at once."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from longspan import Layout, World
from longspan.comm.control_group import ControlGroup
from longspan.comm.groups.channels import Channels
from longspan.comm.groups.meshes import Meshes
from longspan.comm.groups.process_groups import ProcessGroups
from longspan.comm.watch import Watch
from longspan.comm.world import _worlds


class _Rounds:
    """What all ranks' values come to if every other rank has none."""

    def reduce(self, x: Tensor, *_: Any) -> Tensor:
        """Return this rank's tensor."""
        return x

    def reduce_object(self, value: Any, *_: Any) -> Any:
        """Return this rank's value."""
        return value

    broadcast_object = reduce_object


class _Control(ControlGroup):
    """Host values over the same fake group: whatever is asked for of all ranks is this rank's."""

    def __init__(self, home: Layout, plane: tuple[int, ...], groups: ProcessGroups) -> None:
        self.home, self.plane, self._groups = home, plane, groups
        rounds: Any = _Rounds()
        self._rounds = self._rounds_of_plane = rounds
        group = groups.make_group(home.ranks, "control")
        assert group is not None
        self.group = group


class OneRank(World):
    """Rank 0 of a home whose other ranks answer at once, with a communicator for all slots, as on GPUs."""

    def __init__(self, home: Layout, device: torch.device) -> None:
        super().__init__(home)
        dist.init_process_group("fake", rank=0, world_size=len(home.ranks), store=FakeStore())
        self.device, self.rank, self.slot, self.key, self.node_size = device, 0, 0, -2, home.slots
        self.coordinates, self.backend, self.max_groups = home.coordinates(0), "fake", 0
        self.seed, self.plane = 0, home.plane(pp=0, tp=0)
        self.watch = Watch(0, home.ranks, 600.0, None, gpu=device.type == "cuda")
        self.process_groups = ProcessGroups(backend="fake", timeout=600.0, watch=self.watch)
        self.meshes = Meshes(home, 0, self.process_groups, device.type)
        self.control = _Control(home, self.plane, self.process_groups)
        self.channels = Channels(home, 0, device, self.process_groups, self.meshes, max_groups=0)
        self.process_groups.make_parent("plane", [self.plane], "parent")
        communicator = self.process_groups.make_group(self.plane, "communicator")
        assert communicator is not None
        self.process_groups.add_communicator(self.plane, communicator)
        _worlds[self.key] = self

"""The ranks of a home, opened for talking: process groups, host-side agreement, bounded time-outs.

The only module below `cli/` that reads the environment (torchrun's variables). What is decided per micro-batch is in
plans; how the ranks talk on the device is in `channels`; what moves tensors is in `channel`, `ring` and `rows`.
"""

import os
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from longspan.comm.failure.incident import Notes
from longspan.comm.failure.watch import Watch
from longspan.comm.groups.channels import Channels
from longspan.comm.groups.communicator_choice import CommunicatorChoice
from longspan.comm.groups.groups import Groups
from longspan.comm.groups.meshes import Meshes
from longspan.comm.rendezvous import (
    BOTH,
    Place,
    allow_open_files,
    begin,
    choose_device,
    clone,
    corner,
    end,
    gather,
    meet,
    wait_for_ends,
)
from longspan.errors import CommError, counted
from longspan.layout import Coordinates, Layout
from longspan.layout.layout import short

TORCHRUN_SETS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

KNOWN_WHEN_OPEN = frozenset(
    ("rank", "coordinates", "slot", "plane", "device", "backend", "max_groups", "node_size", "seed", "_channels")
)

_keys = count()
_worlds: dict[int, "World"] = {}  # those that are open


def world_of(key: int) -> "World":
    """The open world with this key. Raises CommError where it has been left."""
    if key not in _worlds:
        raise CommError(f"world {key} has been left (open worlds: {sorted(_worlds) or 'none'}); use it inside its with")
    return _worlds[key]


class World(Channels):
    """The ranks of a home, ready to talk; a context manager that every rank enters.

    >>> with World(Layout(ranks=8)) as world:
    ...     world.prepare(plan)
    ...     shard = bind(plan.micro_batches[0], world)

    Reads torchrun's variables, or reuses an initialised default process group and leaves it alone on exit. `backend` is
    "gloo" (CPU) or "nccl" (GPU, with gloo beside it for the host's integers); None takes GPUs where there are any.
    `timeout` in seconds bounds every collective. `max_groups` bounds the communicators of their own that `prepare`
    makes per slot (None: 4 on GPUs, where each costs 485 MiB, and none on CPUs, where they gain nothing).

    `seed` is what dropout's masks are hashed from, with the step: the same on every rank. It begins as the first rank's
    `torch.initial_seed()`; whoever sets it sets the same on all ranks, before micro-batches are bound.

    Raises CommError where the processes that were started are not the home's ranks.
    """

    def __init__(
        self,
        home: Layout,
        backend: str | None = None,
        timeout: float = 600.0,
        device: torch.device | str | None = None,
        *,
        max_groups: int | None = None,
    ) -> None:
        self.home, self.timeout, self.key = home, float(timeout), -1
        self._asked = (backend, device, max_groups)

    # ---- opening and leaving

    def __enter__(self) -> "World":
        if self.key in _worlds:
            raise CommError("this world is already open")
        wait_for_ends(self.timeout)
        self._made_default = not dist.is_initialized()
        place = _started(self.home) if self._made_default else _running(self.home)
        self._take(place)
        allow_open_files(place.size)
        store = meet(place, self.timeout) if self._made_default else dist.distributed_c10d._get_default_store()
        self._open(place, store, gather(store, place, self.timeout))
        return self

    def _take(self, place: Place) -> None:
        """What this rank is and which device it has. It may be refused here, alone: no other rank knows of it yet."""
        backend, device, max_groups = self._asked
        self.rank = place.rank
        self.coordinates: Coordinates = self.home.coordinates(self.rank)
        self.slot = self.coordinates.slot
        self.plane = self.home.plane(pp=self.coordinates.pp, tp=self.coordinates.tp)
        self.device = choose_device(backend, device, place.local_rank)
        self.backend = BOTH if self.device.type == "cuda" else "gloo"
        self.max_groups = max_groups if max_groups is not None else 4 if self.device.type == "cuda" else 0
        self._channels = {}
        self._choice = CommunicatorChoice(self.max_groups)

    def _open(self, place: Place, store: Store, name: str) -> None:
        """Make what the ranks talk through, in this corner of their store."""
        notes = None
        if place.size > 1 and store.has_extended_api():  # pyright: ignore[reportAttributeAccessIssue]
            notes = Notes(self.rank, self.home.ranks, clone(store), f"{name}/watch")
        self._watch = Watch(self.rank, self.home.ranks, self.timeout, notes, gpu=self.device.type == "cuda")
        self._groups = Groups(backend=self.backend, timeout=self.timeout, watch=self._watch)
        self._meshes = Meshes(self.home, self.coordinates.pp, self._groups, self.device.type)
        self.key = next(_keys)
        _worlds[self.key] = self
        self._watch.open()
        try:
            if self._made_default:
                begin(place, corner(store, name), self.backend, self.timeout)
            self._make_groups()
            # As the home's first rank sees them, for every rank must choose alike: slots of a node, and the seed.
            nodes = max(1, _ranks_of_node(len(self.home.ranks)) // self.home.tp)
            self.node_size, self.seed = self.broadcast_object((nodes, torch.initial_seed()))
        except BaseException as error:
            self._leave(error)
            raise

    def _make_groups(self) -> None:
        control = self._groups.make(self.home.ranks, "control", backend="gloo")
        assert control is not None
        self._control = control
        for plane in self.home.planes():
            group = self._groups.make(plane, "parent")
            if group is not None:
                self._groups.set_parent("plane", group)
        self._warm(self._groups.parent("plane"), self.plane, self.channel(range(self.home.slots)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.barrier("leaving the world")
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            self._watch.leave(error)
        self._watch.close()
        del _worlds[self.key]
        self._channels.clear()
        self._meshes.forget()
        for name in ("_meshes", "everyone", "pipeline", "tp_channel", "_control"):
            vars(self).pop(name, None)
        end(self._groups.forget(), default=self._made_default, patient=error is None)

    # ---- what others ask an open world for

    def check_open(self) -> None:
        """Raise CommError where this world has not been opened or has been left."""
        if self.key not in _worlds:
            raise CommError("this world is not open; use it inside `with World(home) as world:`")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What is known once a world is open. Raises CommError before."""
            if name in KNOWN_WHEN_OPEN:
                raise CommError(f"this world is not open, so its {name} is not known; use it inside `with world:`")
            raise AttributeError(f"a World has no attribute {name!r}")

    @property
    def watch(self) -> Watch:
        """What this rank is doing, for error messages."""
        self.check_open()
        return self._watch

    @property
    def control(self) -> ProcessGroup:
        """The gloo group over all ranks, for the host's integers."""
        self.check_open()
        return self._control

    @property
    def step(self) -> int:
        """The step that errors name; set by `run_step`."""
        return self.watch.step

    @step.setter
    def step(self, step: int) -> None:
        self.watch.step = step


def _started(home: Layout) -> Place:
    """This process's place by torchrun's variables; a home of one rank needs none."""
    absent = [name for name in TORCHRUN_SETS if not os.environ.get(name)]
    if absent and home.ranks == (0,) and os.environ.get("WORLD_SIZE", "1") == "1":
        return Place(0, 1, 0, "")
    if absent:
        raise CommError(
            f"the home has {counted(len(home.ranks), 'rank')}, but {' and '.join(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} not set; start the ranks with `torchrun --nproc-per-node "
            f"{len(home.ranks)}`, which sets {', '.join(TORCHRUN_SETS)} and LOCAL_RANK, or with longspan.comm.run_local"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _check_size(home, size)
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return Place(rank, size, int(os.environ.get("LOCAL_RANK", rank)), address)


def _running(home: Layout) -> Place:
    """This process's place in the default process group, which somebody else initialised."""
    _check_size(home, dist.get_world_size())
    rank = dist.get_rank()
    return Place(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", rank)), "")


def _ranks_of_node(ranks: int) -> int:
    """How many ranks run on this machine: torchrun's LOCAL_WORLD_SIZE, all where it is not set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _check_size(home: Layout, size: int) -> None:
    if sorted(home.ranks) != list(range(size)):
        came = (
            "1 process was started, rank 0" if size == 1 else f"{size:,} processes were started, ranks 0 to {size - 1}"
        )
        raise CommError(
            f"the home has {counted(len(home.ranks), 'rank')} {short(home.ranks)}, but {came}; start "
            f"{counted(len(home.ranks), 'process', 'es')}, or make the home of those started: Layout(ranks={size})"
        )

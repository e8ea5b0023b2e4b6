"""The ranks of a home, opened for talking: what a `World` has, how it is opened, and how it is left.

Ranks and addresses are read from torchrun's variables here. What is decided per micro-batch is in
plans; how ranks talk is in what a world has: `control_group`, `channel` and `process_groups`.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count
from socket import gethostname
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from longspan.comm.channel import Channels
from longspan.comm.control_group import ControlGroup
from longspan.comm.cuda_graphs import forget_replays
from longspan.comm.device import BOTH, choose_device
from longspan.comm.failure_reports import FailureReports, read_nodes
from longspan.comm.meshes import Meshes
from longspan.comm.process_groups import ByRanks, ProcessGroups, init_default_group, raise_open_file_limit
from longspan.comm.rendezvous import Place, clone_store_connection, join_world_of_all_ranks, shared_store
from longspan.comm.watch import AnsweringThread, Watch
from longspan.errors import CommError, plural
from longspan.layout import Coordinates, Layout
from longspan.plain_text import excerpt
from longspan.plan import Machine, Plan

TORCHRUN_SETS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# An open world talks through these members.
MEMBERS = ("control", "channels", "process_groups", "meshes", "watch")
KNOWN_WHEN_OPEN = {"rank", "coordinates", "slot", "plane", "device", "backend", "max_groups", "node_size", "seed"}
KNOWN_WHEN_OPEN.update((*MEMBERS, "machine"))

_keys = count()
_worlds: dict[int, "World"] = {}
# Groups of open worlds are kept by the default group that they end with.
_shareable = WeakKeyDictionary[ProcessGroup, ByRanks]()
_being_destroyed: list[threading.Thread] = []  # destroying the groups of worlds that were left with an error


def world_of(key: int) -> "World":
    """Return the open world with this key. Raises CommError where it has been left."""
    if key not in _worlds:
        raise CommError(
            f"world {key} has been left (open worlds: {sorted(_worlds) or 'none'}); use it inside its with"
        )
    return _worlds[key]


class World:
    """The ranks of a home, ready to talk; a context manager that every rank enters, or opens and closes.

    >>> with World(Layout(ranks=8)) as world:
    ...     world.prepare(plan)
    ...     shard = bind(plan.micro_batches[0], world)
    >>> world = World(Layout(ranks=8)).open()           # the same without a block, until world.close()

    Reads torchrun's variables, or reuses an initialised default process group and does not destroy it on exit.
    `backend` is "gloo" (CPU) or "nccl" (GPU, with gloo for the host's integers); None takes GPUs where there are any.
    `timeout` in seconds bounds every collective. `max_groups` bounds the communicators of their own that `prepare`
    makes per slot (None: 4 on GPUs, where each costs 485 MiB; 0 on CPUs). Dropout's masks are hashed from `seed` and
    the step; it begins as the first rank's `torch.initial_seed()`; whoever sets it sets the same on all ranks, before
    micro-batches are bound.

    While it is open it has `control` (host values of all ranks), `channels` (how ranks talk on their device), `meshes`
    (for FSDP2 and DTensor: `.fsdp`, `.tp`, `.expert`, `.ep`), `process_groups` (`.made`: every communicator of this
    rank, with what it is for and the seconds that it took) and `watch` (what this rank is doing, for error messages).

    Worlds of different homes over the same ranks may be open inside each other, as for an encoder and a language model;
    they share communicators of the same ranks where their timeouts are the same:

    >>> with World(Layout(ranks=8, tp=2)) as world, World(Layout(ranks=8)) as encoder_world: ...

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
        self.home: Layout = home
        self.timeout: float = float(timeout)
        # Opening the world gives it a key.
        self.key = -1
        self._arguments = (backend, device, max_groups)
        self._inner_worlds = ExitStack()  # worlds that are left with this one, and `on_leaving`

    def open(self) -> "World":
        """Open the world as `with` does, and return it; entered by all ranks.

        A program that ends while its world is open does not wait for the other ranks; those that wait for it are told.
        """
        return self.__enter__()

    def close(self) -> None:
        """Leave the world as the end of `with` does: together with all ranks.

        Where this rank handles an exception, as in `finally:`, it waits for nobody and tells the others of it. A world
        that is not open stays as it is.
        """
        self.__exit__(*sys.exc_info())

    def __enter__(self) -> "World":
        if self.key in _worlds:
            raise CommError("this world is already open")
        # torch would take a new world's groups for those of a world that was left with an error
        deadline = time.monotonic() + self.timeout
        for thread in _being_destroyed:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise CommError(
                    f"the process groups of a world that was left with an error have not ended in {self.timeout:g} s, "
                    "as a collective of theirs still runs; open the next world in a new process, or give more time"
                )
        _being_destroyed.clear()
        self._made_default = not dist.is_initialized()
        place = _find_place(self.home)  # errors up to the store are this rank's alone, as nothing was sent
        backend, device, max_groups = self._arguments
        self.rank: int = place.rank
        self.coordinates: Coordinates = self.home.coordinates(self.rank)
        self.slot: int = self.coordinates.slot
        self.plane: tuple[int, ...] = self.home.plane(pp=self.coordinates.pp, tp=self.coordinates.tp)
        self.device: torch.device = choose_device(backend, device, place.local_rank)
        self.backend = BOTH if self.device.type == "cuda" else "gloo"
        usual_groups = 4 if self.device.type == "cuda" else 0
        self.max_groups: int = usual_groups if max_groups is None else max_groups
        # Types are chosen by this machine, until `set_world_machine` sets another: an H200 for any GPU.
        self.machine: Machine = Machine.known("H200") if self.device.type == "cuda" else Machine.cpus()
        raise_open_file_limit(place.size)
        store = (
            shared_store(place, self.timeout) if self._made_default else dist.distributed_c10d._get_default_store()
        )
        self._open_channels(place, store, join_world_of_all_ranks(store, place, self.timeout))
        return self

    def _open_channels(self, place: Place, store: Store, prefix: str) -> None:
        """Entered by all ranks; where it fails, the world is left again. Keys of this world in the store have this
        `prefix`."""
        # NCCL would register the buffers of a recorded collective with the members, of which some may launch theirs
        # unrecorded; and recordings are short-lived
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        # A world of one process has no reports, nor one whose store cannot append, which reports need.
        reports = None
        if place.size > 1 and store.has_extended_api():  # pyright: ignore[reportAttributeAccessIssue]
            reports = FailureReports(
                self.rank, self.home.ranks, clone_store_connection(store), f"{prefix}/watch", place.store_server
            )
        self.watch: Watch = Watch(self.rank, self.home.ranks, self.timeout, reports, gpu=self.device.type == "cuda")
        self.watch.open_watches = lambda: [world.watch for world in open_worlds()]
        self.watch.step = max((world.step for world in open_worlds()), default=0)
        self.process_groups: ProcessGroups = ProcessGroups(
            backend=self.backend, timeout=self.timeout, watch=self.watch
        )
        self.meshes: Meshes = Meshes(self.home, self.coordinates.pp, self.process_groups, self.device.type)
        self.key: int = next(_keys)
        _worlds[self.key] = self
        self._answering = None if reports is None else AnsweringThread(self.watch)
        if self._answering is not None:
            # The thread runs before the first collective, which may fail too.
            self._answering.start()
        try:
            if self._made_default:
                with self.watch.enter_operation("making the default group", self.home.ranks, is_work=True):
                    init_default_group(place, PrefixStore(prefix, store), self.backend, self.timeout)
            self.process_groups.shareable = _shareable.setdefault(dist.distributed_c10d._get_default_group(), {})
            self.control: ControlGroup = ControlGroup(self.home, self.plane, self.process_groups)
            self.channels: Channels = Channels(
                self.home, self.rank, self.device, self.process_groups, self.meshes, self.max_groups
            )
            # Slots of a node, the seed and the nodes: those of the home's first rank, for every rank must choose alike.
            slots = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", len(self.home.ranks))) // self.home.tp)
            reads_nodes = reports is not None and place.rank == self.home.ranks[0]
            nodes = read_nodes(store, prefix, place.size) if reads_nodes else None
            self.node_size: int
            self.seed: int
            self.node_size, self.seed, nodes = self.control.broadcast_object((slots, torch.initial_seed(), nodes))
            if reports is not None:
                reports.nodes = nodes
        except BaseException as error:
            self._leave_world(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.key not in _worlds:  # closed before, or left inside another one at the program's end
            return
        try:
            self._inner_worlds.__exit__(kind, error, trace)
            if error is None:
                self.control.barrier("leaving the world")
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._leave_world(error)

    def _leave_world(self, error: BaseException | None) -> None:
        """Without an error, wait for the groups' end. With one, tell the others and wait a second at most, and the rest
        goes on in a thread: a group with a collective in flight ends only when that does."""
        if error is not None:
            self.watch.report_leaving(error)
        if self._answering is not None:
            self._answering.stop()
        self.meshes.forget_meshes()
        forget_replays()
        groups = self.process_groups.drop_groups()
        del _worlds[self.key]
        for name in MEMBERS:
            vars(self).pop(name, None)

        def destroy() -> None:
            if not self._made_default:
                for group in groups:
                    dist.destroy_process_group(group)
            elif dist.is_initialized():
                dist.destroy_process_group()

        if error is None:
            destroy()
        else:
            thread = threading.Thread(target=destroy, name="longspan leaving", daemon=True)
            thread.start()
            thread.join(1.0)
            _being_destroyed[:] = [running for running in (*_being_destroyed, thread) if running.is_alive()]

    @property
    def ranks_of_host(self) -> int:
        """Ranks of this world on one host."""
        return min(len(self.home.ranks), self.node_size * self.home.tp)

    def open_inner(self, home: Layout) -> "World":
        """Open a world of another home over the same ranks, left with this one; it is this one where homes are equal.

        >>> encoder_world = world.open_inner(Layout(ranks=8, tp=2))  # entered by all ranks
        """
        self.check_open()
        if home == self.home:
            return self
        backend, device, max_groups = self._arguments
        inner = self._inner_worlds.enter_context(World(home, backend, self.timeout, device, max_groups=max_groups))
        # The machine's times choose types of context parallelism.
        inner.machine = self.machine
        return inner

    def on_leaving(self, action: Callable[[], None]) -> None:
        """Have `action` called when the world is left without an error; of several actions the last one first."""
        self._inner_worlds.push(lambda kind, *_: action() if kind is None else None)

    def prepare(self, plan: Plan) -> None:
        """Compare the plan among all ranks, and make communicators for its groups that gain from one and lack it.

        Entered by all ranks. Those are the groups of a plan whose groups all have one degree, and groups that recur in
        the micro-batches of the plans prepared so far, up to `max_groups` for each slot; all others talk point to point
        on the plane's group. Raises CommError where ranks hold different plans or the plan is for another number of
        slots.
        """
        if plan.slots != self.home.slots:
            raise CommError(
                f"the plan is for {plan.slots} slots, the home has {self.home.slots}; plan for this home"
            )
        self.control.compare_digests(plan.digest())
        if self.max_groups:
            self.channels.make_communicators(plan)

    def check_open(self) -> None:
        """Raise CommError unless this world is open."""
        if self.key not in _worlds:
            raise CommError(
                "this world is not open; use it inside `with World(home) as world:`, or open it: world.open()"
            )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise CommError for what is known only once a world is open."""
            if name in KNOWN_WHEN_OPEN:
                raise CommError(f"this world is not open, so its {name} is not known; use it inside `with world:`")
            raise AttributeError(f"a World has no attribute {name!r}")

    @property
    def step(self) -> int:
        """Return the step that errors name, set by `run_step`. Worlds that are open inside each other have one step."""
        return self.watch.step

    @step.setter
    def step(self, step: int) -> None:
        self.check_open()
        for world in open_worlds():
            world.watch.step = step


def open_worlds() -> list[World]:
    """Return the worlds that are open on this rank, the outermost first."""
    return [world for world in list(_worlds.values()) if "watch" in vars(world)]


@atexit.register
def _leave_open_worlds() -> None:
    """As with an error: without waiting for other ranks."""
    for world in reversed(open_worlds()):
        error = getattr(sys, "last_value", None) or CommError("the program ended before it closed the world")
        with suppress(Exception):
            world.__exit__(type(error), error, error.__traceback__)


def _find_place(home: Layout) -> Place:
    """The default group goes before torchrun's variables; a home of rank 0 alone needs neither. Without LOCAL_RANK, all
    ranks are taken to be on one host. A node is named by torchrun's number (GROUP_RANK) where that is set."""
    address = ""
    if dist.is_initialized():
        rank = dist.get_rank()
        size = dist.get_world_size()
    else:
        absent = [name for name in TORCHRUN_SETS if not os.environ.get(name)]
        if absent and home.ranks == (0,) and os.environ.get("WORLD_SIZE", "1") == "1":
            return Place(0, 1, 0, "")
        if absent:
            raise CommError(
                f"the home has {plural(len(home.ranks), 'rank')}, but {' and '.join(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} not set; start the ranks with `torchrun --nproc-per-node "
                f"{len(home.ranks)}`, which sets {', '.join(TORCHRUN_SETS)} and LOCAL_RANK, or with "
                "longspan.comm.run_local"
            )
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
    if sorted(home.ranks) != list(range(size)):
        started = (
            "1 process was started, rank 0"
            if size == 1
            else f"{size:,} processes were started, ranks 0 to {size - 1}"
        )
        raise CommError(
            f"the home has {plural(len(home.ranks), 'rank')} {excerpt(home.ranks)}, but {started}; start "
            f"{plural(len(home.ranks), 'process', 'es')}, or make the home of those started: Layout(ranks={size})"
        )
    number = os.environ.get("GROUP_RANK")
    node = f"host {gethostname()}" if number is None else f"node {number} (host {gethostname()})"
    store_server = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    return Place(rank, size, int(os.environ.get("LOCAL_RANK", rank)), address, node, store_server)

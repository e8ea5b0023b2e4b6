"""The ranks of a home, opened for talking: process groups, host-side agreement, bounded time-outs.

The only module below `cli/` that reads the environment (torchrun's variables). What is decided per micro-batch is in
plans; what moves tensors is in `groups`, `ring` and `rows`.
"""

import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from longspan.comm.groups import Channel, GroupKind, GroupRecord, Groups, _worlds
from longspan.comm.meeting import BOTH, Place, begin, choose_device, corner, end, meet, own_connection
from longspan.comm.rollcall import Watch, short
from longspan.errors import CommError
from longspan.layout import Coordinates, Layout
from longspan.plan import Plan

T = TypeVar("T")
_keys = count()


class World:
    """The ranks of a home, ready to talk; a context manager that every rank enters.

    >>> with World(Layout(ranks=8)) as world:
    ...     world.prepare(plan)
    ...     shard = bind(plan.micro_batches[0], world)

    Reads torchrun's variables, or reuses an initialised default process group and leaves it alone on exit. `backend` is
    "gloo" (CPU) or "nccl" (GPU, with gloo beside it for the host's integers); None takes GPUs where there are any.
    `timeout` in seconds bounds every collective. `max_groups` bounds the communicators of their own that `prepare`
    makes per slot (None: 4 on GPUs, where each costs 485 MiB, and none on CPUs, where they gain nothing).

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
        backend, device, max_groups = self._asked
        self._made_default = not dist.is_initialized()
        place = _started(self.home) if self._made_default else _running(self.home)
        self.key, self.rank = next(_keys), place.rank
        self.coordinates: Coordinates = self.home.coordinates(self.rank)
        self.slot = self.coordinates.slot
        self.plane = self.home.plane(pp=self.coordinates.pp, tp=self.coordinates.tp)
        self.device = choose_device(backend, device, place.local_rank)
        self.backend = BOTH if self.device.type == "cuda" else "gloo"
        self.max_groups = max_groups if max_groups is not None else 4 if self.device.type == "cuda" else 0
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._recurring: Counter[tuple[int, ...]] = Counter()  # micro-batches in which these slots were a group
        self._own: set[tuple[int, ...]] = set()  # slots that have a communicator of their own
        self._load: Counter[int] = Counter()  # such communicators per slot
        self._open(place)
        return self

    def _open(self, place: Place) -> None:
        if self._made_default:
            store = meet(place, self.timeout)
            begin(place, corner(store, f"longspan/{self.key}"), self.backend, self.timeout)
        else:
            store = dist.distributed_c10d._get_default_store()
        asking = own_connection(store) if place.size > 1 else None
        own = None if asking is None else corner(asking, f"longspan/{self.key}/watch")
        self._watch = Watch(self.rank, self.home.ranks, self.timeout, own, asking)
        self._watch.open()
        self._groups = Groups(backend=self.backend, timeout=self.timeout, watch=self._watch)
        _worlds[self.key] = self
        try:
            self._make_groups()
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
        except CommError as failure:
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
        for name in ("fsdp_mesh", "everyone", "_control"):
            self.__dict__.pop(name, None)
        end(self._groups.forget(), default=self._made_default, patient=error is None)

    def _warm(self, group: ProcessGroup, ranks: Sequence[int], neighbours: Channel | None = None) -> None:
        """NCCL: every member enters the first collective, after which any subset may talk point to point."""
        if self.device.type != "cuda":
            return
        with self._watch.during("warming a communicator", ranks):
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.synchronize(self.device)
        if neighbours is not None and neighbours.degree > 1:
            channel, x = neighbours, torch.zeros(1, device=self.device)
            right, left = (channel.index + 1) % channel.degree, (channel.index - 1) % channel.degree
            channel.exchange([(right, x)], [(left, x.clone())], "warming point-to-point").wait()
            torch.cuda.synchronize(self.device)

    # ---- channels and communicators

    @property
    def watch(self) -> Watch:
        """What this rank is doing, for error messages."""
        self._check_open()
        return self._watch

    @property
    def control(self) -> ProcessGroup:
        """The gloo group over all ranks, for the host's integers."""
        self._check_open()
        return self._control

    @property
    def step(self) -> int:
        """The step that errors name; set by `run_step`."""
        return self.watch.step

    @step.setter
    def step(self, step: int) -> None:
        self.watch.step = step

    @property
    def groups_made(self) -> list[GroupRecord]:
        """Every communicator that this rank is in, with what it is for and the seconds that it took to make."""
        self._check_open()
        return list(self._groups.made)

    def channel(self, slots: Sequence[int]) -> Channel:
        """How these slots talk in this rank's plane. Raises CommError where this rank's slot is not one of them."""
        slots = tuple(slots)
        if slots not in self._channels:
            self._check_open()
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
    def everyone(self) -> Channel:
        """A channel over all ranks of the home, in its order; first asked for by all ranks together.

        With more than one plane it makes a group of its own.
        """
        self._check_open()
        if self.plane == self.home.ranks:
            return self.channel(range(self.home.slots))
        group = self._groups.make(self.home.ranks, "everyone")
        assert group is not None
        self._groups.set_parent("everyone", group)
        index = self.home.ranks.index(self.rank)
        channel = Channel(self._groups, self.home.ranks, index, self.device, "everyone")
        self._warm(group, self.home.ranks, channel)
        return channel

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """A mesh over this plane's ranks for FSDP2, with groups of its own; first asked for by all ranks together.

        One axis "slots"; with `dp_replicate` > 1 two axes "replicate" × "slots".
        """
        self._check_open()
        copies = self.home.dp_replicate
        width = self.home.slots // copies
        mine: dict[str, ProcessGroup] = {}
        for plane in self.home.planes():
            rows = [plane[i * width : (i + 1) * width] for i in range(copies)]
            columns = [plane[i::width] for i in range(width)] if copies > 1 else []
            wanted: list[tuple[GroupKind, tuple[int, ...]]] = [("slots", row) for row in rows]
            wanted += [("replicate", column) for column in columns]
            for kind, members in wanted:
                group = self._groups.make(members, kind)
                if group is not None:
                    mine[kind] = group
        if copies == 1:
            return DeviceMesh.from_group(mine["slots"], self.device.type, mesh_dim_names=("slots",))
        mesh = torch.tensor(self.plane, dtype=torch.int).view(copies, width)
        groups = [mine["replicate"], mine["slots"]]
        return DeviceMesh.from_group(groups, self.device.type, mesh, mesh_dim_names=("replicate", "slots"))

    def prepare(self, plan: Plan) -> None:
        """Make the communicators of their own that this plan's groups gain from and lack; entered by all ranks.

        Those are the groups of a plan whose groups all have one degree, and groups that recur in the micro-batches of
        the plans prepared so far, up to `max_groups` for each slot; all others talk point to point on the plane's
        group. Raises CommError where ranks hold different plans or the plan is for another number of slots.
        """
        if plan.slots != self.home.slots:
            raise CommError(f"the plan is for {plan.slots} slots, the home has {self.home.slots}; plan for this home")
        self.agree(plan.digest())
        for slots in self._wanted(plan):
            for plane in self.home.planes():
                ranks = tuple(plane[slot] for slot in slots)
                group = self._groups.make(ranks, "communicator")
                if group is not None:
                    self._groups.add_communicator(ranks, group)
                    self._warm(group, ranks)

    def _wanted(self, plan: Plan) -> list[tuple[int, ...]]:
        """The slot tuples to make communicators for, in plan order: the same on every rank."""
        groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups if group.degree > 1]
        one_degree = len({group.degree for group in groups}) == 1
        self._recurring.update(tuple(sorted(group.slots)) for group in groups)
        wanted: list[tuple[int, ...]] = []
        for slots in dict.fromkeys(tuple(sorted(group.slots)) for group in groups):
            room = all(self._load[slot] < self.max_groups for slot in slots)
            if room and slots not in self._own and (one_degree or self._recurring[slots] > 1):
                wanted.append(slots)
                self._own.add(slots)
                self._load.update(slots)
        return wanted

    # ---- host-side values, over gloo

    def agree(self, digest: str) -> None:
        """Compare a hexadecimal digest over all ranks. Raises CommError that says which ranks hold what."""
        words = torch.frombuffer(bytearray.fromhex(digest.zfill(64)), dtype=torch.int64)
        both = torch.stack([words, ~words])  # the largest of ~w is ~(the smallest w)
        with self.watch.during("comparison of plans", self.home.ranks):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.control)
        if torch.equal(both[0], ~both[1]):
            return
        held: dict[str, list[int]] = {}
        for rank, other in zip(self.home.ranks, self.gather_objects(digest), strict=True):
            held.setdefault(other, []).append(rank)
        who = "; ".join(f"ranks {short(ranks)} hold {other[:12]}…" for other, ranks in held.items())
        raise CommError(
            f"the ranks hold {len(held)} different plans for step {self.step}: {who}. A plan must be made from the "
            f"same lengths and settings on every rank"
        )

    def gather_objects(self, value: T, what: str = "gather of host values") -> list[T]:
        """Every rank's value, in the order of the home's ranks. For small host data."""
        found: list[Any] = [None] * len(self.home.ranks)
        with self.watch.during(what, self.home.ranks):
            dist.all_gather_object(found, value, group=self.control)
        by_rank = dict(zip(sorted(self.home.ranks), found, strict=True))  # torch sorts the ranks of a group
        return [by_rank[rank] for rank in self.home.ranks]

    def broadcast_object(self, value: T, source: int | None = None, what: str = "broadcast of host values") -> T:
        """The value of the `source` rank (default: the home's first). For small host data."""
        box: list[Any] = [value]
        with self.watch.during(what, self.home.ranks):
            dist.broadcast_object_list(box, src=self.home.ranks[0] if source is None else source, group=self.control)
        return box[0]

    def barrier(self, what: str = "barrier") -> None:
        """Wait until every rank is here."""
        with self.watch.during(what, self.home.ranks):
            dist.barrier(group=self.control)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        found = torch.tensor([int(flag)])
        with self.watch.during("agreement on a flag", self.home.ranks):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.control)
        return bool(found.item())

    def reduce_sum(self, values: Sequence[float], what: str = "sum over slots") -> list[float]:
        """Sums over the slots of this plane, in float64 and in one order, so that every rank gets the same bits."""
        own = torch.tensor(list(values), dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in self.plane]
        with self.watch.during(what, self.plane):
            dist.all_gather(parts, own, group=self._groups.parent("plane"))
        return torch.stack(parts).sum(0).tolist()

    def _check_open(self) -> None:
        if self.key not in _worlds:
            raise CommError("this world is not open; use it inside `with World(home) as world:`")


def _started(home: Layout) -> Place:
    """This process's place by torchrun's variables; a home of one rank needs none."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if home.ranks == (0,):
            return Place(0, 1, 0, "")
        raise CommError(
            f"the home has {len(home.ranks)} ranks, but RANK and WORLD_SIZE are not set; start the ranks with "
            f"`torchrun --nproc-per-node {len(home.ranks)}` or longspan.comm.run_local"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _check_size(home, size)
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return Place(rank, size, int(os.environ.get("LOCAL_RANK", rank)), address)


def _running(home: Layout) -> Place:
    """This process's place in the default process group, which somebody else initialised."""
    _check_size(home, dist.get_world_size())
    rank = dist.get_rank()
    return Place(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", rank)), "")


def _check_size(home: Layout, size: int) -> None:
    if sorted(home.ranks) != list(range(size)):
        raise CommError(
            f"the home has {len(home.ranks)} ranks {short(home.ranks)}, but {size} processes were started (0 to "
            f"{size - 1}); start {len(home.ranks)} processes, or make the home of all {size}"
        )

"""The communicators of a world, by rank tuple: made, shared between worlds, and destroyed.

A bounded number of communicators, made by `World.prepare`, is the fast way for groups that recur (`channel.py` has the
general one). Worlds that are open inside each other share communicators of the same ranks: on NCCL each costs 485 MiB.
None is never passed to torch, which would take it for the whole world.
"""

import os
import resource
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from longspan.comm.rendezvous import Place
from longspan.comm.watch import Watch
from longspan.errors import CommError, plural
from longspan.launch.environment import temporary_variables
from longspan.plan import Plan

ParentName = Literal["plane", "everyone", "pipeline", "tp", "control"]

# Kinds whose messages travel while kernels of the same layer run. Their NCCL kernels go before blocks of a running
# kernel that wait for a place on the device: behind them, a message that is sent ahead starts late.
AHEAD = frozenset({"parent", "everyone", "communicator"})


@dataclass(frozen=True)
class GroupRecord:
    """One communicator that a world made: its ranks, what it is for, and the seconds that it took.

    `kind` is "control" (host values), "parent" (point-to-point of a plane), "everyone" (of all planes), "slots",
    "replicate", "tp", "outer" and "ep" (axes of device meshes), "pipeline" (the stages of a slot), "saves" (of the
    threads that write checkpoints), or "communicator" (a plan's group).
    """

    ranks: tuple[int, ...]
    kind: str
    seconds: float


@dataclass(eq=False)
class Shareable:
    """A communicator that open worlds of a process may share; `group` is None where this rank is no member.

    Every rank keeps one, so that all ranks of a world find the same communicators to share.
    """

    group: ProcessGroup | None
    users: int = 0


# Groups are shared by ranks, torch's options and purpose, in the order in which they were made.
ByRanks = dict[tuple[object, ...], list[Shareable]]


class ProcessGroups:
    """The communicators of one world, made by all its ranks in one order and looked up by rank tuple."""

    def __init__(self, *, backend: str, timeout: float, watch: Watch) -> None:
        self.watch = watch
        self.shareable: ByRanks = {}  # shared with the open worlds that have the same
        self.made: list[GroupRecord] = []
        self._backend = backend
        self._timeout = timeout
        self._used: list[Shareable] = []
        self.by_ranks: dict[tuple[int, ...], ProcessGroup] = {}  # communicators, by their ranks in ascending order
        # Point-to-point messages run on these groups.
        self.parents: dict[ParentName, ProcessGroup] = {}

    def make_group(
        self, ranks: Sequence[int], kind: str, *, backend: str | None = None, timeout: float | None = None
    ) -> ProcessGroup | None:
        """Make one communicator; called by every rank of the world in one order. None where this rank is no member.

        If another open world has a communicator of these ranks for the same purpose, with the same backend and timeout,
        and this world does not use it yet, it is shared, and is not among `made`. All axes of meshes are one purpose,
        and so are all kinds that carry a layer's messages. `timeout` is that of the group's collectives in seconds.
        `backend` and `timeout` None are the world's.
        """
        backend = backend or self._backend
        timeout = timeout or self._timeout
        purpose = kind if kind in ("control", "pipeline", "saves") else "meshes"
        if kind in AHEAD:
            purpose = "messages"
        candidates = self.shareable.setdefault((tuple(sorted(ranks)), backend, timeout, purpose), [])
        shareable = next((candidate for candidate in candidates if candidate not in self._used), None)
        if shareable is None:
            started = time.monotonic()
            limit = timedelta(seconds=timeout)
            options = None
            if kind in AHEAD and "nccl" in backend:
                options = dist.ProcessGroupNCCL.Options()
                options.is_high_priority_stream = True
                options._timeout = limit  # else torch warns that it differs from the group's
            # then gloo carries no tensors of a model: these go over NCCL, or the group has none
            takes_host_values = kind in ("control", "saves") or backend != "gloo"
            connecting = defer_connections() if takes_host_values else nullcontext()
            with self.watch.enter_operation(f"making the {kind} group", ranks, is_work=True), connecting:
                group = dist.new_group(
                    list(ranks), timeout=limit, backend=backend, pg_options=options, group_desc=f"longspan {kind}"
                )
            shareable = Shareable(None)
            if self.watch.rank in ranks:  # else torch has returned a number
                assert isinstance(group, ProcessGroup)
                shareable.group = group
                self.made.append(GroupRecord(tuple(ranks), kind, time.monotonic() - started))
            candidates.append(shareable)
        shareable.users += 1
        self._used.append(shareable)
        return shareable.group

    def communicator(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """Return the communicator of these ranks in this order; None where they have none, and talk point to point, as
        ranks that do not ascend always do.
        """
        return self.by_ranks.get(tuple(ranks))

    def parent(self, name: ParentName) -> ProcessGroup:
        """Return the group on which this kind of channel talks point to point. Raises CommError once the world has been
        left.
        """
        if name not in self.parents:
            raise CommError("this world has been left; its channels can no longer talk")
        return self.parents[name]

    def make_parent(self, name: ParentName, lines: Sequence[Sequence[int]], kind: str) -> None:
        """Make a group of this kind of each of these tuples of ranks; this rank's becomes the parent of that name."""
        for ranks in lines:
            group = self.make_group(ranks, kind)
            if group is not None:
                self.parents[name] = group

    def drop_groups(self) -> list[ProcessGroup]:
        """Give up all groups, as the world is left; return those that no other world shares, which the
        caller destroys.
        """
        for shareable in self._used:
            shareable.users -= 1
        unused = [
            candidate.group for candidate in self._used if candidate.users == 0 and candidate.group is not None
        ]
        for shareables in self.shareable.values():
            shareables[:] = [candidate for candidate in shareables if candidate.users]
        self._used.clear()
        self.parents.clear()
        self.by_ranks.clear()
        return unused


class CommunicatorChoice:
    """Chooses, plan after plan, the slots that get a communicator, at most `max_groups` for each slot.

    A group gains one where it recurs: where all groups of its plan have one degree (the fixed degrees of training and
    evaluation), or where it has been in two micro-batches so far. A group gets one only if its slots ascend, as those
    of longspan's planners do; another talks point to point, for torch sorts the ranks of a communicator.
    """

    def __init__(self, max_groups: int) -> None:
        self.max_groups = max_groups
        self._seen = Counter[tuple[int, ...]]()  # how many micro-batches had these slots as a group
        self._chosen = set[tuple[int, ...]]()
        self._load = Counter[int]()  # communicators per slot

    def choose_groups(self, plan: Plan) -> list[tuple[int, ...]]:
        """Return the slots of this plan's groups that get communicators now, in plan order.

        What is chosen is remembered, and so is how often each group was seen that may still get one.
        """
        groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups if group.degree > 1]
        one_degree = len({group.degree for group in groups}) == 1
        candidates = [group.slots for group in groups if self._may_get_communicator(group.slots)]
        self._seen.update(candidates)
        chosen_groups = list[tuple[int, ...]]()
        # A chosen group may have taken the room of the next candidate.
        for slots in dict.fromkeys(candidates):
            if self._may_get_communicator(slots) and (one_degree or self._seen[slots] > 1):
                chosen_groups.append(slots)
                self._chosen.add(slots)
                self._load.update(slots)
                del self._seen[slots]
        return chosen_groups

    def _may_get_communicator(self, slots: tuple[int, ...]) -> bool:
        """A communicator is never given up, so each slot needs room for one more."""
        has_room = all(self._load[slot] < self.max_groups for slot in slots)
        return has_room and slots not in self._chosen and slots == tuple(sorted(slots))


# Gloo connects every pair of members of a group that carries a CPU's tensors when it makes it: of the plane's group, of
# three for meshes and all planes, and of four that plans gain. In the default and the control group the first rank may
# come to talk to all others. A process has some 25 other files open in a bare world.
CONNECTIONS = 10
OTHER_FILES = 256
_LAZY = "TORCH_GLOO_LAZY_INIT"
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def raise_open_file_limit(size: int) -> None:
    """Raise this process's limit of open files to what a world of `size` ranks opens, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = OTHER_FILES + CONNECTIONS * size
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else min(need, hard), hard)
        )


def init_default_group(place: Place, store: Store, backend: str, timeout: float) -> None:
    """Make torch's default group of all processes of a launch, which have all come; raise CommError where they do not
    connect.
    """
    # torch's NCCL group asks the store each second whether a rank wants traces dumped, and writes 25 lines of frames
    # each second once the store is gone. Reports of failures are longspan's own.
    no_questions = temporary_variables({_DUMP: os.environ.get(_DUMP, "0")})
    try:
        with defer_connections(), no_questions:  # longspan itself sends nothing over it
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=timeout)
            )
    except RuntimeError as error:
        raise CommError(
            f"rank {place.rank} could not connect to the others of {plural(place.size, 'rank')}, which all came, in "
            f"{timeout:g} s; check that the hosts reach each other, or name the network in GLOO_SOCKET_IFNAME ({error})"
        ) from error


def defer_connections() -> AbstractContextManager[None]:
    """Let groups made inside connect two ranks over gloo at their first message, not all with all when they are made.

    A rank that leaves before the first message is not noticed by the other, so groups over which tensors of a CPU
    travel are made outside of this. torch reads the variable when it makes a group (2.8 to 2.15); where the user has
    set it, it stays so.
    """
    return temporary_variables({_LAZY: os.environ.get(_LAZY, "1")})

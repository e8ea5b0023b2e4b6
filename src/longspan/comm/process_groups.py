"""The communicators of a world, by rank tuple.

A bounded number of communicators, made by `World.prepare`, is the fast way for groups that recur (`channel.py` has the
general one). Worlds that are open inside each other share communicators of the same ranks: on NCCL each costs 485 MiB.
None is never passed to torch, which would take it for the whole world.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from longspan.comm.rendezvous import defer_connections
from longspan.comm.watch import Watch
from longspan.errors import CommError

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


ByRanks = dict[tuple[object, ...], list[Shareable]]  # by ranks, torch's options and purpose, in the order made


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
        self.parents: dict[ParentName, ProcessGroup] = {}  # on which point-to-point runs

    def make_group(
        self, ranks: Sequence[int], kind: str, *, backend: str | None = None, timeout: float | None = None
    ) -> ProcessGroup | None:
        """Make one communicator; called by every rank of the world in one order. None where this rank is no member.

        If another open world has a communicator of these ranks for the same purpose, and this world does not use it
        yet, it is shared, and is not among `made`. All axes of meshes are one purpose, and so are all kinds that carry
        a layer's messages. `timeout` is that of the group's collectives in seconds (None: the world's).
        """
        backend = backend or self._backend
        timeout = timeout or self._timeout
        purpose = kind if kind in ("control", "pipeline", "saves") else "meshes"
        if kind in AHEAD:
            purpose = "messages"
        candidates = self.shareable.setdefault((tuple(sorted(ranks)), backend, timeout, purpose), [])
        shareable = next((candidate for candidate in candidates if candidate not in self._used), None)
        if shareable is None:
            shareable = Shareable(self._new_group(ranks, kind, backend, timeout))
            candidates.append(shareable)
        shareable.users += 1
        self._used.append(shareable)
        return shareable.group

    def _new_group(self, ranks: Sequence[int], kind: str, backend: str, seconds: float) -> ProcessGroup | None:
        started = time.monotonic()
        timeout = timedelta(seconds=seconds)
        options = None
        if kind in AHEAD and "nccl" in backend:
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = True
            options._timeout = timeout  # else torch warns that it differs from the group's
        # only host values travel over this group's gloo side: its tensors, if it has any, go over NCCL
        takes_host_values = kind in ("control", "saves") or backend != "gloo"
        connecting = defer_connections() if takes_host_values else nullcontext()
        with self.watch.enter_operation(f"making the {kind} group", ranks, is_work=True), connecting:
            group = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=f"longspan {kind}"
            )
        if self.watch.rank not in ranks:
            return None
        assert isinstance(group, ProcessGroup)
        self.made.append(GroupRecord(tuple(ranks), kind, time.monotonic() - started))
        return group

    def communicator(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """None where the members talk point to point, as those do whose ranks do not ascend."""
        return self.by_ranks.get(tuple(ranks))

    def parent(self, name: ParentName) -> ProcessGroup:
        """Raises CommError once the world has been left."""
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
        """Drop every reference; returns the groups to destroy, which no world shares."""
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

"""The communicators of a world, by rank tuple, and the device meshes over them.

A bounded number of communicators, made by `World.prepare`, is the fast way for groups that recur (`channel.py` has the
general one). Worlds that are open inside each other share communicators of the same ranks: on NCCL each costs 485 MiB.
None is never passed to torch, which would take it for the whole world.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from longspan.comm.rendezvous import defer_connections
from longspan.comm.stated_gradients import apply_with_gradient
from longspan.comm.watch import Watch
from longspan.errors import CommError
from longspan.layout import Integers, Layout
from longspan.plain_text import excerpt

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


REPLICATE = "replicate"
SLOTS = "slots"
OUTER = "outer"
EP = "ep"
TP = "tp"


@dataclass(eq=False)
class Meshes:
    """The device meshes of one rank's pipeline stage, made on first use by all ranks of the home together.

    Every property raises CommError for a home that has no such mesh, before a group is made.
    """

    _home: Layout
    _stage: int
    _groups: ProcessGroups
    _device_type: str
    _axis_groups: dict[str, ProcessGroup] = field(default_factory=dict[str, ProcessGroup])

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """Return the mesh over which FSDP2 shards parameters: "slots", or "replicate" × "slots"."""
        return self._slice_root(self._root_mesh, (REPLICATE, SLOTS))

    @cached_property
    def tp(self) -> DeviceMesh:
        """Return the mesh of this slot's tensor-parallel ranks."""
        self._check_axis(TP, self._home.tp)
        return self._slice_root(self._root_mesh, (TP,))

    @cached_property
    def expert(self) -> DeviceMesh:
        """Return the mesh over which FSDP2 shards expert parameters: all ranks of a stage that hold the same experts.

        Its axis "outer" has every ep-th slot, with all tensor-parallel ranks of each. With tp and ep 1 it is `fsdp`.
        """
        if self._home.ep == self._home.tp == 1:
            return self.fsdp
        return self._slice_root(self._expert_root_mesh, (REPLICATE, OUTER))

    @cached_property
    def ep(self) -> DeviceMesh:
        """Return the mesh of the `home.ep` neighbouring slots that this rank shares its experts with."""
        self._check_axis(EP, self._home.ep)
        return self._slice_root(self._expert_root_mesh, (EP,))

    def forget_meshes(self) -> None:
        """Clear torch's caches of these meshes, whose groups are about to be destroyed.

        torch (2.11 to 2.15) keeps a mesh with the sharding of every operation that it has seen on DTensors, and meshes
        of the same ranks and axes are equal: a later world would get these meshes and their destroyed groups. Each
        thread has its own cache, and on a GPU backward passes run in another thread than forward passes.
        """
        if not self._axis_groups:
            return
        _forget_shardings()
        if self._device_type == "cuda":

            def forget_in_its_thread(gradient: Tensor) -> Tensor:
                _forget_shardings()
                return gradient

            with torch.enable_grad():
                x = torch.zeros((), device="cuda", requires_grad=True)
                apply_with_gradient(x, Tensor.clone, forget_in_its_thread).backward()
        self._axis_groups.clear()

    @cached_property
    def _root_mesh(self) -> DeviceMesh:
        """(replicate, slots of one replica, tp)"""
        home = self._home
        width = home.slots // home.dp_replicate
        by_stage = np.asarray(home.ranks).reshape(home.pp, home.dp_replicate, width, home.tp)
        return self._build_mesh((REPLICATE, SLOTS, TP), by_stage)

    @cached_property
    def _expert_root_mesh(self) -> DeviceMesh:
        """(replicate, outer, ep): neighbours along `ep` together hold all experts."""
        home = self._home
        width = home.slots // home.dp_replicate
        if width % home.ep:
            raise CommError(
                f"ep {home.ep} does not divide the {width} slots of a replica ({home.slots} slots / dp_replicate "
                f"{home.dp_replicate}), so copies of experts would not line up; use an ep that divides {width}"
            )
        ranks = np.asarray(home.ranks).reshape(home.pp, home.dp_replicate, width // home.ep, home.ep, home.tp)
        ranks = ranks.swapaxes(3, 4).reshape(home.pp, home.dp_replicate, -1, home.ep)
        return self._build_mesh((REPLICATE, OUTER, EP), ranks)

    def _build_mesh(self, axes: Sequence[str], ranks: Integers) -> DeviceMesh:
        """Axes of size 1 are left out, but for those over slots."""
        ranks = self._sort_for_groups(ranks, axes)
        sizes = ranks.shape[1:]
        dims = [
            i for i, (axis, size) in enumerate(zip(axes, sizes, strict=True)) if axis in (SLOTS, OUTER) or size > 1
        ]
        names = tuple(axes[i] for i in dims)
        for i in dims:
            if axes[i] in self._axis_groups:
                continue
            for line in np.moveaxis(ranks, i + 1, -1).reshape(-1, sizes[i]).tolist():
                if (group := self._groups.make_group(line, axes[i])) is not None:
                    self._axis_groups[axes[i]] = group
        groups = [self._axis_groups[name] for name in names]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self._device_type, mesh_dim_names=names)
        # DTensor warns of every norm and every whole tensor that two axes take two messages for (torch 2.13).
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        mesh = torch.from_numpy(ranks[self._stage].reshape([sizes[i] for i in dims])).to(torch.int)
        return DeviceMesh.from_group(groups, self._device_type, mesh, mesh_dim_names=names)

    def _sort_for_groups(self, ranks: Integers, axes: Sequence[str]) -> Integers:
        """Return the ranks with axes ascending, as torch orders a group's members. Slots alone are sorted: which holds
        which shard is free. Beside tp or ep their order says who holds what: CommError if it descends. Replicas may.
        """
        if tuple(axes) == (REPLICATE, SLOTS, TP) and self._home.tp == 1:
            return np.sort(ranks, axis=2)
        for i, axis in enumerate(axes):
            for line in np.moveaxis(ranks, i + 1, -1).reshape(-1, ranks.shape[i + 1]):
                if axis != REPLICATE and (np.diff(line) < 0).any():
                    raise CommError(
                        f"the home's ranks {excerpt(line.tolist())} descend along {axis}, but torch orders the members "
                        "of a group by rank; with tp or ep, give the home its ranks in ascending order"
                    )
        return ranks

    def _slice_root(self, root: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
        assert root.mesh_dim_names is not None
        return root[tuple(axis for axis in axes if axis in root.mesh_dim_names)]

    def _check_axis(self, axis: str, size: int) -> None:
        if size == 1:
            raise CommError(
                f"the home has {axis} 1, so it has no {axis} mesh; use Layout(ranks=…, {axis}=2) or more"
            )


def _forget_shardings() -> None:
    from torch.distributed.tensor import DTensor  # here: the import takes half a second

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()

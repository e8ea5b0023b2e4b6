"""The device meshes of a world, over communicators of its ranks along each axis, and exchanges along an axis."""

import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from longspan.comm.autograd import apply_with_gradient
from longspan.comm.process_groups import ProcessGroups
from longspan.errors import CommError
from longspan.layout import Integers, Layout
from longspan.plain_text import excerpt

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
        """Axes (replicate, slots of one replica, tp), those of size 1 left out."""
        home = self._home
        width = home.slots // home.dp_replicate
        by_stage = np.asarray(home.ranks).reshape(home.pp, home.dp_replicate, width, home.tp)
        return self._build_mesh((REPLICATE, SLOTS, TP), by_stage)

    @cached_property
    def _expert_root_mesh(self) -> DeviceMesh:
        """Axes (replicate, outer, ep): neighbours along `ep` together hold all experts."""
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
        """Entered by all ranks, which make missing groups together. Axes of size 1 are left out, but for those over
        slots. torch orders the members of a group by rank. Without tp and ep slots are sorted so, as any slot may hold
        any shard. Otherwise a slot's place says what it holds: ranks may descend along replicas only."""
        sizes = ranks.shape[1:]
        if tuple(axes) == (REPLICATE, SLOTS, TP) and self._home.tp == 1:
            ranks = np.sort(ranks, axis=2)
        else:
            _check_ranks_ascend(axes, ranks)
        dims = [
            i for i, (axis, size) in enumerate(zip(axes, sizes, strict=True)) if axis in (SLOTS, OUTER) or size > 1
        ]
        names = tuple(axes[i] for i in dims)
        for i in dims:
            if axes[i] in self._axis_groups:
                continue
            for line in _lines_along(ranks, i).tolist():
                if (group := self._groups.make_group(line, axes[i])) is not None:
                    self._axis_groups[axes[i]] = group
        groups = [self._axis_groups[name] for name in names]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self._device_type, mesh_dim_names=names)
        # DTensor warns of every norm and every whole tensor that two axes take two messages for (torch 2.13).
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        mesh = torch.from_numpy(ranks[self._stage].reshape([sizes[i] for i in dims])).to(torch.int)
        return DeviceMesh.from_group(groups, self._device_type, mesh, mesh_dim_names=names)

    def _slice_root(self, root: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
        assert root.mesh_dim_names is not None
        return root[tuple(axis for axis in axes if axis in root.mesh_dim_names)]

    def _check_axis(self, axis: str, size: int) -> None:
        if size == 1:
            raise CommError(
                f"the home has {axis} 1, so it has no {axis} mesh; use Layout(ranks=…, {axis}=2) or more"
            )


def _lines_along(ranks: Integers, axis: int) -> Integers:
    """(stages, *axes) to (lines, size)"""
    return np.moveaxis(ranks, axis + 1, -1).reshape(-1, ranks.shape[axis + 1])


def _check_ranks_ascend(axes: Sequence[str], ranks: Integers) -> None:
    """Ranks may descend along replicas, which are alike."""
    for i, axis in enumerate(axes):
        for line in _lines_along(ranks, i):
            if axis != REPLICATE and (np.diff(line) < 0).any():
                raise CommError(
                    f"the home's ranks {excerpt(line.tolist())} descend along {axis}, but torch orders the "
                    "members of a group by rank; with tp or ep, give the home its ranks in ascending order"
                )


def _forget_shardings() -> None:
    from torch.distributed.tensor import DTensor  # here: the import takes half a second

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    # the same in C++, where this torch has it
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def exchange_tensors(
    tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: ProcessGroup
) -> Generator[None, None, list[Tensor]]:
    """Send `tensors[m]` to member m of an axis of a mesh; return, in member order, what each sends here.

    `shapes[m]` is the shape of what member m sends. The tensors of a call have one dtype. This generator yields once,
    when all is on its way, and waits when it is resumed; its return value is the result.
    """
    sends = [tensor.numel() for tensor in tensors]
    receives = [math.prod(shape) for shape in shapes]
    leaving = torch.cat([tensor.reshape(-1) for tensor in tensors])
    arriving = leaving.new_empty(sum(receives))
    work = group.alltoall_base(arriving, leaving, receives, sends)
    yield
    work.wait()
    return [part.view(*shape) for part, shape in zip(arriving.split(receives), shapes, strict=True)]

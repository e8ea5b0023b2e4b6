"""Device meshes of a home, for FSDP2 and DTensor: slices of root meshes, over groups that the world makes.

A root mesh covers one pipeline stage. That of most parameters has the axes "replicate" × "slots" × "tp", that of expert
parameters "replicate" × "outer" × "ep": outer × ep are the slots of one replica in order, and the tensor-parallel ranks
of a slot, each of which computes its part of the rows with the same experts, stand side by side on "outer". An axis
"replicate", "ep" or "tp" of size 1 is left out. FSDP2 over DTensors asks that its own mesh and theirs are slices of one
root. Groups are made when a mesh that needs them is first used, by all ranks together, and shared by both roots.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from longspan.comm.groups.process_groups import ProcessGroups
from longspan.errors import CommError
from longspan.layout import Integers, Layout
from longspan.layout.layout import excerpt

REPLICATE, SLOTS, OUTER, EP, TP = "replicate", "slots", "outer", "ep", "tp"


class Meshes:
    """The device meshes of one rank's pipeline stage, made on first use by all ranks of the home together.

    Every property raises CommError for a home that has no such mesh, before a group is made.
    """

    def __init__(self, home: Layout, stage: int, groups: ProcessGroups, device_type: str) -> None:
        self._home, self._stage, self._groups, self._device_type = home, stage, groups, device_type
        self._axis_groups: dict[str, ProcessGroup] = {}

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """Return the mesh over which FSDP2 shards parameters: "slots", or "replicate" × "slots"."""
        return self._slice_root(self._root_mesh, (REPLICATE, SLOTS))

    @cached_property
    def tp(self) -> DeviceMesh:
        """Return the mesh of this slot's tensor-parallel ranks, a slice of the root that `fsdp` is a slice of."""
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
            with torch.enable_grad():
                _InBackwardThread.apply(torch.zeros((), device="cuda", requires_grad=True)).backward()
        self._axis_groups.clear()

    @cached_property
    def _root_mesh(self) -> DeviceMesh:
        """Return the mesh (replicate, slots of one replica, tp) of this stage. Its slices are `fsdp` and `tp`."""
        home = self._home
        width = home.slots // home.dp_replicate
        by_stage = np.asarray(home.ranks).reshape(home.pp, home.dp_replicate, width, home.tp)
        return self._build_mesh((REPLICATE, SLOTS, TP), by_stage)

    @cached_property
    def _expert_root_mesh(self) -> DeviceMesh:
        """Return the mesh (replicate, outer, ep) of this stage, whose slices are `expert` and `ep`.

        Neighbours along `ep` together hold all experts.
        """
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
        """Axes of size 1 are left out, but for those over slots. Every rank makes the groups of all lines along each
        axis.
        """
        ranks = self._sort_for_groups(ranks, axes)
        sizes = ranks.shape[1:]
        dims = [i for i, (axis, size) in enumerate(zip(axes, sizes, strict=True)) if axis in (SLOTS, OUTER) or size > 1]
        groups = [self._make_groups_of_axis(axes[i], np.moveaxis(ranks, i + 1, -1).reshape(-1, sizes[i])) for i in dims]
        names = tuple(axes[i] for i in dims)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self._device_type, mesh_dim_names=names)
        # DTensor warns of every norm and every whole tensor that two axes take two messages for (torch 2.13).
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        mesh = torch.from_numpy(ranks[self._stage].reshape([sizes[i] for i in dims])).to(torch.int)
        return DeviceMesh.from_group(groups, self._device_type, mesh, mesh_dim_names=names)

    def _make_groups_of_axis(self, axis: str, lines: Integers) -> ProcessGroup:
        """Make the groups of all lines along an axis, on every rank in one order; return this rank's."""
        if axis not in self._axis_groups:
            for line in lines.tolist():
                group = self._groups.make_group(line, axis)
                if group is not None:
                    self._axis_groups[axis] = group
        return self._axis_groups[axis]

    def _sort_for_groups(self, ranks: Integers, axes: Sequence[str]) -> Integers:
        """Which slot holds which shard of a parameter is free, so only slots are sorted. With other axes next to them
        the order is the home's, as it decides who holds which heads or experts: CommError is raised if it descends.
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
            raise CommError(f"the home has {axis} 1, so it has no {axis} mesh; use Layout(ranks=…, {axis}=2) or more")


def _forget_shardings() -> None:
    from torch.distributed.tensor import DTensor  # here: the import takes half a second

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


class _InBackwardThread(torch.autograd.Function):
    """An identity whose backward clears what the thread that runs it keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _forget_shardings()
        return gradients[0]

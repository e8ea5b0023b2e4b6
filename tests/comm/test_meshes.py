"""Device meshes of every home: who is in which axis, that FSDP2 takes DTensors of the same root, what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from longspan.comm import World
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.testing import backend, run_ranks

HOMES = (
    Layout(ranks=4, pp=2, tp=2),
    Layout(ranks=4, tp=2, dp_replicate=2),
    Layout(ranks=4, ep=2),
    Layout(ranks=4, ep=2, dp_replicate=2),
    Layout(ranks=4, ep=4),
)
LARGE = (Layout(ranks=8, tp=2, ep=2, dp_replicate=2),)

Members = dict[str, tuple[int, ...]]


def _members(mesh: DeviceMesh) -> Members:
    names = mesh.mesh_dim_names or ()
    return {name: tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in names}


def _visit_all(rank: int, homes: tuple[Layout, ...]) -> list[tuple[dict[str, Members], list[str]]]:
    visited = list[tuple[dict[str, Members], list[str]]]()
    for home in homes:
        with World(home, backend=backend(), timeout=60) as world:
            meshes = {"fsdp": world.meshes.fsdp, "expert": world.meshes.expert}
            meshes |= {name: getattr(world.meshes, name) for name in ("tp", "ep") if getattr(home, name) > 1}
            assert world.meshes.fsdp is meshes["fsdp"] and world.meshes.expert is meshes["expert"]
            for names, over in (("fsdp", "tp"), ("expert", "ep")):
                if over in meshes:
                    _shard_twice(world, meshes[names], meshes[over])
            slots = world.meshes.fsdp.get_group("slots")
            assert slots is not world.process_groups.parent("plane"), "point-to-point never runs on FSDP's group"
            kinds = [record.kind for record in world.process_groups.made]
            visited.append(({name: _members(mesh) for name, mesh in meshes.items()}, kinds))
    return visited


def _shard_twice(world: World, outer: DeviceMesh, inner: DeviceMesh) -> None:
    layer = nn.Linear(8, 16, bias=False, device=world.device)
    weight = torch.arange(128.0, device=world.device).view(16, 8)
    layer.weight = nn.Parameter(distribute_tensor(weight, inner, [Shard(0)], src_data_rank=None))
    fully_shard(layer, mesh=outer)
    layer.set_force_sum_reduction_for_comms(True)
    layer.set_gradient_divide_factor(1.0)
    x = DTensor.from_local(torch.ones(2, 8, device=world.device), inner)
    layer(x).sum().backward()
    assert isinstance(layer.weight, DTensor) and torch.equal(layer.weight.full_tensor(), weight)
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor) and (gradient.full_tensor() == 2 * outer.size()).all()


def _wanted(home: Layout, rank: int) -> dict[str, Members]:
    copies, width = home.dp_replicate, home.slots // home.dp_replicate

    def place(other: int) -> dict[str, int]:
        pp, slot, tp = home.coordinates(other)
        replicate, slots = divmod(slot, width)
        indices = {"pp": pp, "replicate": replicate, "slots": slots, "tp": tp}
        return indices | {"outer": slots // home.ep, "ep": slots % home.ep}

    def line(*free: str) -> tuple[int, ...]:
        here = place(rank)
        same = [r for r in home.ranks if all(place(r)[axis] == here[axis] for axis in here if axis not in free)]
        return tuple(sorted(same))

    first: Members = {"replicate": line("replicate")} if copies > 1 else {}
    meshes: dict[str, Members] = {"fsdp": first | {"slots": line("slots", "outer", "ep")}}
    alone = home.ep == home.tp == 1
    meshes["expert"] = meshes["fsdp"] if alone else first | {"outer": line("slots", "outer", "tp")}
    if home.tp > 1:
        meshes["tp"] = {"tp": line("tp")}
    if home.ep > 1:
        meshes["ep"] = {"ep": line("slots", "ep")}
    return meshes


@pytest.mark.parametrize(("ranks", "homes"), [(4, HOMES), (8, LARGE)])
def test_axes_hold_their_ranks_and_fsdp2_takes_tensors_of_the_same_root(ranks: int, homes: tuple[Layout, ...]) -> None:
    for rank, of_rank in enumerate(run_ranks(_visit_all, ranks, homes)):
        for home, (meshes, kinds) in zip(homes, of_rank, strict=True):
            assert meshes == _wanted(home, rank), home
            axes = [kind for kind in kinds if kind not in ("control", "parent")]
            assert len(axes) == len(set(axes)) == len({a for mesh in meshes.values() for a in mesh}), (
                "one group an axis"
            )


REFUSED = [
    (Layout(ranks=4), "tp", "the home has tp 1, so it has no tp mesh"),
    (Layout(ranks=4), "ep", "the home has ep 1, so it has no ep mesh"),
    (Layout(ranks=4, ep=4, dp_replicate=2), "ep", "ep 4 does not divide the 2 slots of a replica .4 slots"),
    (Layout(ranks=(0, 1, 3, 2), tp=2), "tp", r"ranks \(3, 2\) descend along tp"),
    (Layout(ranks=(2, 3, 0, 1), tp=2), "fsdp", r"ranks \(2, 0\) descend along slots"),
    (Layout(ranks=(1, 0, 2, 3), ep=2), "expert", r"ranks \(1, 0\) descend along ep"),
]


def _refused(rank: int) -> None:
    with World(Layout(ranks=(2, 0, 3, 1), dp_replicate=2), backend=backend(), timeout=60) as world:
        layer = nn.Linear(8, 16, bias=False, device=world.device)
        weight = layer.weight.detach().fill_(0).add_(torch.arange(128.0, device=world.device).view(16, 8)).clone()
        fully_shard(layer, mesh=world.meshes.fsdp)
        assert isinstance(layer.weight, DTensor) and torch.equal(layer.weight.full_tensor(), weight)
    for home, name, says in REFUSED:
        with World(home, backend=backend(), timeout=60) as world:
            before = len(world.process_groups.made)
            with pytest.raises(CommError, match=says):
                getattr(world.meshes, name)
            assert len(world.process_groups.made) == before


def test_slots_in_any_order_of_ranks_and_homes_without_such_a_mesh() -> None:
    run_ranks(_refused, 4)


def _again(rank: int) -> list[float]:
    """Two worlds with equal meshes over groups of other names, in one process: norms, and norms of gradients."""
    norms = []
    for pipeline_first in (False, True):
        with World(Layout(ranks=4, pp=2), backend=backend(), timeout=60) as world:
            if pipeline_first:
                _ = world.channels.pipeline
            local = torch.full((1,), 3.0 + world.slot, device=world.device)  # norms 3 and 4: 5 of both, exactly
            x = DTensor.from_local(local, world.meshes.fsdp, [Shard(0)], run_check=False)
            norm = torch.linalg.vector_norm(x.requires_grad_())
            assert isinstance(norm, DTensor)
            norms.append(norm.full_tensor().item())
            (x * x).sum().backward()  # on a GPU in another thread
            assert isinstance(x.grad, DTensor)
            norms.append(x.grad.full_tensor().norm().item())
    return norms


def test_a_world_after_a_world_has_meshes_of_its_own() -> None:
    assert run_ranks(_again, 4) == [[5.0, 10.0, 5.0, 10.0]] * 4

"""An encoder's rows and gradients through bridges between unlike layouts, against one dense computation in float64."""

import pytest
import torch
from torch import Tensor

from longspan import Bridge, Exchange, Layout, Partition, World
from longspan.comm.row_exchange import RowGradient
from longspan.errors import LayoutError
from longspan.testing import backend, run_ranks

Lists = list[list[int]]
HOME = {
    "data parallel to data parallel": (
        Layout(ranks=4),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 1, 2, 3, 4, 5, 6, 7], [7], [], []],
    ),
    "replicated encoder to sequence shards": (
        Layout(ranks=4),
        [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]],
        [[4, 0], [1], [2], [3]],
    ),
    "shards to tensor-parallel replicas": (
        Layout(ranks=4, tp=2),
        [[0, 1], [2], [3], []],
        [[3, 1], [3, 1], [2, 0], [2, 0]],
    ),
    "pipeline": (Layout(ranks=4, pp=2), [[5], [4], [3, 2, 1], []], [[1, 2], [3, 4, 5], [], []]),
    "no image on any rank": (Layout(ranks=4), [[], [], [], []], [[], [], [], []]),
}
GRADIENTS: dict[str, RowGradient] = {"shards to tensor-parallel replicas": "identical"}


def features(rows: list[int]) -> Tensor:
    """Encoder inputs that name their row."""
    inputs = [torch.sin(torch.arange(5, dtype=torch.float64) + 5 * row) for row in rows]
    return torch.stack(inputs) if inputs else torch.empty(0, 5, dtype=torch.float64)


def weights(rows: list[int]) -> Tensor:
    """What the language model does with a row, wherever the row is."""
    return torch.cos(features(rows)[:, :3] * 2)


def encoder() -> torch.nn.Linear:
    generator = torch.Generator().manual_seed(3)
    layer = torch.nn.Linear(5, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(3, 5, generator=generator, dtype=torch.float64))
    return layer


def through(rank: int, names: list[str]) -> None:
    home = HOME[names[0]][0]
    with World(home, backend=backend(), timeout=60) as world:
        for name in names:
            _, have, need = HOME[name]
            check(rank, have, need, world, GRADIENTS.get(name, "partial"))
        if world.plane != home.ranks:
            assert [record.kind for record in world.process_groups.made].count("everyone") == 1


def check(rank: int, have: Lists, need: Lists, world: World, gradient: RowGradient) -> None:
    layer = encoder().to(world.device)
    hidden = layer(features(have[rank]).to(world.device))
    hidden.retain_grad()
    bridge = Bridge(Partition.from_rows(have), Partition.from_rows(need), world, gradient=gradient)
    arrived = bridge(hidden)
    dense_rows = encoder().to(world.device)(features(need[rank]).to(world.device))
    # not the same bits on GPUs: a matrix product of other rows may be taken by another kernel
    torch.testing.assert_close(arrived.detach(), dense_rows.detach(), rtol=1e-12, atol=1e-13)
    (arrived.pow(2) * weights(need[rank]).to(world.device)).sum().backward()
    uses = [sum(rows.count(row) for rows in need) for row in have[rank]]
    counted = torch.tensor([min(n, 1) if gradient == "identical" else n for n in uses], dtype=torch.float64)
    dense = encoder()(features(have[rank])).detach().requires_grad_()
    (dense.pow(2) * weights(have[rank]) * counted[:, None]).sum().backward()
    expected = dense.grad
    assert hidden.grad is not None and expected is not None
    torch.testing.assert_close(hidden.grad.cpu(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("home", dict.fromkeys(home for home, _, _ in HOME.values()), ids=str)
def test_an_encoder_through_a_bridge_equals_the_dense_computation(home: Layout) -> None:
    run_ranks(through, 4, [name for name, (other, _, _) in HOME.items() if other == home])


def public_example(rank: int) -> None:
    have, need = Partition.from_rows([[0, 1], [2], []]), Partition.from_rows([[2], [2, 0], [1]])
    assert [Exchange(have, need).received_rows(r) for r in range(3)] == [1, 1, 1]
    with World(Layout(ranks=3), backend=backend()) as world:
        values = ([1.0, 2.0], [3.0], [])[rank]
        x = torch.tensor(values, dtype=torch.float64, device=world.device).reshape(-1, 1).requires_grad_()
        bridge = Bridge(have, need, world, gradient="partial")
        y = bridge(x)
        assert y.flatten().tolist() == [[3.0], [3.0, 1.0], [2.0]][rank] and "Bridge" in repr(bridge)
        (y.sum() * (rank + 1)).backward()
        assert x.grad is not None and x.grad.flatten().tolist() == [[2.0, 3.0], [3.0], []][rank]


def test_partial_gradients_are_summed_over_the_ranks_that_used_a_row() -> None:
    run_ranks(public_example, 3)


def refuse(rank: int) -> None:
    with World(Layout(ranks=2), backend=backend()) as world:
        with pytest.raises(LayoutError, match="row 5 is needed by rank 1 and nobody has it"):
            Bridge(Partition.from_rows([[0], [1]]), Partition.from_rows([[1], [5]]), world)
        with pytest.raises(LayoutError, match="the exchange is among 1 ranks, the channel has 2"):
            Bridge(Partition.from_rows([[0]]), Partition.from_rows([[0]]), world)


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    run_ranks(refuse, 2)

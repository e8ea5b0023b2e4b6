"""Collectives over channels equal their dense meaning, forward and backward, under both gradient conventions."""

import pytest
import torch
from torch import Tensor

from longspan.comm.groups.channel import Channel
from longspan.comm.moves.collectives import Gradient, all_reduce_sum, gather_rows, scatter_rows
from longspan.comm.world import World
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.testing import backend, run_ranks

COUNTS = {1: [(3,)], 2: [(2, 2), (0, 3)], 3: [(1, 4, 2)], 4: [(2, 2, 2, 2), (0, 3, 0, 1)]}
GRADIENTS: tuple[Gradient, ...] = ("identical", "partial")


def numbers(*shape: int, seed: int) -> Tensor:
    """Small integers in float64, so that every sum is exact."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def weight_of(member: int, gradient: Gradient, *shape: int) -> Tensor:
    """What member computes from the shared result: the same everywhere, or a part of its own."""
    return numbers(*shape, seed=100 + (member if gradient == "partial" else 0))


def check(rank: int, n: int) -> None:
    with World(Layout(ranks=n), backend=backend(), timeout=60) as world:
        channel = world.channels.between(tuple(reversed(range(n))))
        for counts in COUNTS[n]:
            for gradient in GRADIENTS:
                check_gather(channel, counts, gradient)
                check_scatter(channel, counts, gradient)
                check_sum(channel, gradient)
            check_all_to_all(channel, counts)


def check_gather(channel: Channel, counts: tuple[int, ...], gradient: Gradient) -> None:
    everything, me, device = numbers(sum(counts), 2, seed=1), channel.index, channel.device
    own = everything.split(counts)[me].to(device).clone().requires_grad_()
    found = gather_rows(own, counts, channel, gradient=gradient)
    assert torch.equal(found.cpu(), everything)
    (found * weight_of(me, gradient, *everything.shape).to(device)).sum().backward()
    users = range(channel.degree) if gradient == "partial" else [0]
    wanted = torch.stack([weight_of(m, gradient, *everything.shape) for m in users]).sum(0)
    assert own.grad is not None and torch.equal(own.grad.cpu(), wanted.split(counts)[me])


def check_scatter(channel: Channel, counts: tuple[int, ...], gradient: Gradient) -> None:
    everything, me, device = numbers(sum(counts), 2, seed=1), channel.index, channel.device
    whole = everything.to(device).clone().requires_grad_()
    found = scatter_rows(whole, counts, channel, gradient=gradient)
    assert torch.equal(found.cpu(), everything.split(counts)[me])
    weights = numbers(*everything.shape, seed=7)  # row by row, whoever holds the row
    (found * weights.split(counts)[me].to(device)).sum().backward()
    if gradient == "partial":
        weights = torch.cat([part if m == me else part * 0 for m, part in enumerate(weights.split(counts))])
    assert whole.grad is not None and torch.equal(whole.grad.cpu(), weights)


def check_sum(channel: Channel, gradient: Gradient) -> None:
    me, device = channel.index, channel.device
    own = numbers(3, 2, seed=me).to(device).requires_grad_()
    found = all_reduce_sum(own, channel, gradient=gradient)
    assert torch.equal(found.cpu(), sum((numbers(3, 2, seed=m) for m in range(channel.degree)), torch.zeros(3, 2)))
    (found * weight_of(me, gradient, 3, 2).to(device)).sum().backward()
    users = range(channel.degree) if gradient == "partial" else [0]
    assert own.grad is not None
    assert torch.equal(own.grad.cpu(), torch.stack([weight_of(m, gradient, 3, 2) for m in users]).sum(0))


def check_all_to_all(channel: Channel, counts: tuple[int, ...]) -> None:
    def rows(sender: int, receiver: int) -> Tensor:
        return numbers(counts[sender], 2, seed=10 * sender + receiver).to(channel.device)

    me, members = channel.index, range(channel.degree)
    sent = torch.cat([rows(me, m) for m in members])
    found = channel.all_to_all_rows(sent, [counts[me]] * channel.degree, counts, "all to all").wait()
    assert torch.equal(found, torch.cat([rows(m, me) for m in members]))


@pytest.mark.parametrize("n", COUNTS)
def test_collectives_and_their_gradients(n: int) -> None:
    run_ranks(check, n, n)


def refuse(rank: int) -> None:
    with World(Layout(ranks=1), backend=backend()) as world:
        channel, x = world.channels.between((0,)), torch.zeros(3, 1, device=world.device)
        with pytest.raises(CommError, match=r"gather_rows got 3 rows from member 0 of 1, whose counts are \(4,\)"):
            gather_rows(x, (4,), channel, gradient="partial")
        with pytest.raises(CommError, match="scatter_rows got 3 rows, the members take 5"):
            scatter_rows(x, (5,), channel, gradient="partial")
        with pytest.raises(CommError, match="gradient 'both' is not known"):
            all_reduce_sum(x, channel, gradient="both")  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(refuse, 1)

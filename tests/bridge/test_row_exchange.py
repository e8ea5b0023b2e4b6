"""Rows reach the ranks that need them, their gradients the ranks that have them: against one dense computation."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch

from longspan.bridge.bridge import RowExchange, RowGradient
from longspan.comm import Channel
from longspan.comm.routed_rows import send_routed_rows
from longspan.comm.world import World
from longspan.errors import CommError, LayoutError
from longspan.layout import Exchange, Layout, Partition
from longspan.testing import backend, run_ranks

Lists = list[list[int]]


def exchange_of(have: Lists, need: Lists) -> Exchange:
    return Exchange(Partition.from_rows(have), Partition.from_rows(need))


def check_all(rank: int) -> None:
    """Members are ranks of the same number; `tests/bridge` has every convention of gradients."""
    with World(Layout(ranks=3), backend=backend(), timeout=60) as world:
        channels = {n: world.channels.find_channel(range(n)) for n in range(rank + 1, 4)}
        for n, checks in {2: (frozen, refuse, any_strides, written), 3: (rounded_once,)}.items():
            for check in checks if rank < n else ():
                check(rank, channels[n])


def frozen(rank: int, channel: Channel) -> None:
    """Every rank enters backward, also one whose rows need no gradient."""
    exchange = exchange_of([[0], [1]], [[1], [0]])
    x = torch.ones(1, 1, device=channel.device, requires_grad=rank == 0)
    y = RowExchange(exchange, channel, gradient="partial")(x)
    (y * (rank + 2)).sum().backward()
    assert x.grad is None if rank else x.grad is not None and x.grad.item() == 3.0
    with torch.no_grad():
        assert not RowExchange(exchange, channel)(x).requires_grad


def refuse(rank: int, channel: Channel) -> None:
    exchange = exchange_of([[0], [1]], [[1], [0]])
    with pytest.raises(LayoutError, match="3 rows were given, this member has 1"):
        RowExchange(exchange, channel)(torch.zeros(3, 1))
    with pytest.raises(CommError, match="gradient 'both' is not known"):
        RowExchange(exchange, channel, gradient="both")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="the exchange is among 3 ranks, the channel has 2"):
        RowExchange(exchange_of([[0], [], []], [[], [0], []]), channel)
    for sends, receives in (([3], [2]), ([1, 1], [2]), ([2], [])):
        with pytest.raises(CommError, match="send_routed_rows got 2 rows to send as"):
            send_routed_rows(torch.zeros(2, 1), sends, receives, channel)


OPERATIONS = {"aten::index": "index", "aten::index_copy_": "copies", "c10d::send": "sends", "c10d::recv_": "receives"}


LAYOUTS: dict[RowGradient, tuple[Lists, Lists]] = {
    "partial": ([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9], [], []], [[9, 0, 6, 2], [7, 5, 3], [], []]),
    "partial_over_slots": ([[0, 1, 2, 3], [4, 5, 6, 7], [], []], [[0, 4, 5, 3], [6, 7, 1, 2], [], []]),
    "identical": ([[0, 1, 2, 3]] * 4, [[3, 0, 2, 1]] * 4),
}


def counts(rank: int) -> list[list[dict[str, int]]]:
    slots = [[0], [1], [2], [3]]
    by_layout = list[list[dict[str, int]]]()
    with World(Layout(ranks=4), backend=backend(), timeout=60) as world:
        for gradient, (have, need) in LAYOUTS.items():
            x = torch.ones(len(have[rank]), 2, device=world.device, requires_grad=True)
            move = RowExchange(exchange_of(have, need), world.channels.everyone, gradient=gradient, slots=slots)
            y = move(x)
            by_layout.append([operations(partial(move, x)), operations(partial(move.carry_back, torch.ones_like(y)))])
    return by_layout


def operations(run: Callable[[], object]) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    events = {event.key: event.count for event in profile.key_averages()}
    assert not any(name in events for name in ("aten::item", "aten::nonzero", "aten::_local_scalar_dense")), events
    return {name: events.get(key, 0) for key, name in OPERATIONS.items()}


@pytest.mark.skipif(backend() != "gloo", reason="other messages have other names")
def test_rows_are_copied_once_where_what_arrives_is_one_run_and_what_leaves_lies_in_one_piece() -> None:
    def of(index: int, *, messages: int = 1) -> dict[str, int]:
        return {"index": index, "copies": 0, "sends": messages, "receives": messages}

    in_pieces, from_two_sides, after_rows_that_stay, no_rows, nothing_travels = (
        # packing, rows that stay meanwhile, unpacking; what arrives in one run is not unpacked
        [[of(3), of(3)], [of(2), of(3)]],
        [of(2), of(2)],
        [of(1), of(1)],
        [of(0, messages=0)] * 2,
        [of(1, messages=0)] * 2,
    )
    assert run_ranks(counts, 4) == [
        [in_pieces[0], from_two_sides, nothing_travels],
        [in_pieces[1], after_rows_that_stay, nothing_travels],
        [no_rows, no_rows, nothing_travels],
        [no_rows, no_rows, nothing_travels],
    ]


def rounded_once(rank: int, channel: Channel) -> None:
    """256 + 1 + 1 = 258 in float32; a bfloat16 sum would stay 256. By three ranks, by one, and by one and another."""
    for need, uses in (
        ([[0], [0], [0]], [[256.0], [1.0], [1.0]]),
        ([[], [0, 0, 0], []], [[], [256.0, 1.0, 1.0], []]),
        ([[0], [], [0, 0]], [[256.0], [], [1.0, 1.0]]),
    ):
        move = RowExchange(exchange_of([[0], [], [0]], need), channel)
        gradient = torch.tensor(uses[rank], dtype=torch.bfloat16, device=channel.device)[:, None]
        assert move.carry_back(gradient).flatten().tolist() == [[258.0], [], [258.0]][rank]
        assert move.carry_back(gradient).dtype == torch.bfloat16


def any_strides(rank: int, channel: Channel) -> None:
    have, need = [[0, 1, 2], [3, 4]], [[4, 1, 0, 4], [0, 3]]
    move = RowExchange(exchange_of(have, need), channel)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
    for dims, dtype in product(((0, 1, 2), (1, 0, 2), (2, 1, 0)), dtypes):
        everything = torch.arange(5 * 4 * 8, device=channel.device).reshape(5, 4, 8).to(dtype)
        back_again = [dims.index(dim) for dim in range(3)]
        x = everything[have[rank]].permute(dims).contiguous().permute(back_again)
        assert torch.equal(move(x), everything[need[rank]])
    assert move(x[:, 0, 0]).tolist() == everything[need[rank], 0, 0].tolist()
    assert move(x[:, :0]).shape == (len(need[rank]), 0, 8)


def written(rank: int, channel: Channel) -> None:
    """Rows that arrive can be written into."""
    layouts = (([[0, 1], [2]], [[0, 1], [0, 1]]), ([[0, 1], [2]], [[2], [0]]), ([[0], [0]], [[], [0]]))
    for have, need in layouts:
        x = torch.ones(len(have[rank]), 2, device=channel.device, requires_grad=True)
        y = RowExchange(exchange_of(have, need), channel)(x)
        y.mul_(3)
        y.sum().backward()
        uses = [sum(rows.count(row) for rows in need) for row in have[rank]]
        assert torch.equal(x.detach().cpu(), torch.ones(x.shape)) and x.grad is not None
        assert x.grad.cpu().tolist() == [[3.0 * count] * 2 for count in uses]


def test_rows_and_gradients() -> None:
    run_ranks(check_all, 3)

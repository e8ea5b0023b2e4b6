"""Rows between unlike layouts are the same bits, their gradients the dense sums, and no rank receives one too many."""

import contextlib
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from longspan import Bridge, World
from longspan.comm.channel import Channel, Handle
from longspan.testing import backend, run_ranks
from tests.bridge.layouts import CASES, Case
from tests.layout.copies import lacking, random_gradients, summed

WIDTH = 3
SCALES = 2.0 ** torch.arange(WIDTH, dtype=torch.float64)  # of columns of a gradient: products with them are exact


def coded(rows: list[int]) -> Tensor:
    """Rows that name themselves and their columns."""
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 1) * 16 + torch.arange(WIDTH)


def gradients_of(case: Case) -> list[np.ndarray]:
    """A number for every copy, by rank: the same for those copies whose gradient is the same."""
    group_of = {rank: index for index, ranks in enumerate(case.groups) for rank in ranks}
    alike = case.gradient == "identical"
    return random_gradients(case.need, lambda rank, row, number: (group_of[rank], row, 0 if alike else number))


def expected_gradient(case: Case, rank: int) -> Tensor:
    """The dense sums of this rank's rows, of which identical copies count once."""
    need, gradients = case.need, gradients_of(case)
    if case.gradient == "identical":
        first = [[rows.index(row) == place for place, row in enumerate(rows)] for rows in need]
        gradients = [
            numbers[np.array(is_first, dtype=bool)] for numbers, is_first in zip(gradients, first, strict=True)
        ]
        need = [list(dict.fromkeys(rows)) for rows in need]
    sums = torch.tensor(summed(case.have, need, gradients, case.groups)[rank], dtype=torch.float64)
    return sums.reshape(-1, 1) * SCALES


def wrong(rank: int, case: Case, world: World) -> list[str]:
    """What a bridge does wrong for one case on this rank."""
    device, errors = world.device, list[str]()
    bridge = Bridge(case.partition(case.have), case.partition(case.need), world, gradient=case.gradient)
    x = coded(case.have[rank]).to(device).requires_grad_(case.gradient != "none")
    with recorded_receives(world.channels.everyone) as received:
        y = bridge(x)
        there = sum(received)
        if not torch.equal(y.detach().cpu(), coded(case.need[rank])):
            errors.append(f"{y} arrived instead of {case.need[rank]}")
        if case.gradient != "none":
            y.backward((torch.from_numpy(gradients_of(case)[rank]).reshape(-1, 1) * SCALES).to(device))
            expected = expected_gradient(case, rank)
            if x.grad is None or not torch.equal(x.grad.cpu(), expected):
                errors.append(f"the gradient is {x.grad} instead of {expected}")
    back = 0 if case.gradient == "none" else lacking(case.have, case.need, case.groups, rank)
    bounds = bridge.exchange.lower_bound_rows(world.home.ranks.index(rank)), back
    if (there, sum(received) - there) != bounds or bridge.received_rows != bounds:
        errors.append(f"{received} and {bridge.received_rows} rows were received instead of {bounds}")
    return errors


@contextlib.contextmanager
def recorded_receives(channel: Channel) -> Iterator[list[int]]:
    """How many rows each exchange of this channel is to receive from other members."""
    received, exchange = list[int](), channel.exchange_runs

    def record(x: Tensor, sends: Sequence[int], into: Tensor, receives: Sequence[int], what: str) -> Handle:
        assert len(into) == sum(receives) and len(x) == sum(sends) and not sends[channel.index]
        received.append(sum(receives))
        return exchange(x, sends, into, receives, what)

    with patch.object(channel, "exchange_runs", record):
        yield received


def all_wrong(rank: int, names: list[str]) -> list[str]:
    """Errors of the named cases, in one world for each home."""
    errors = list[str]()
    for home in dict.fromkeys(CASES[name].home for name in names):
        with World(home, backend=backend(), timeout=60) as world:
            for name in (name for name in names if CASES[name].home == home):
                errors += [f"{name}, rank {rank}: {error}" for error in wrong(rank, CASES[name], world)]
    return errors


def test_rows_are_the_same_bits_and_gradients_the_dense_sums() -> None:
    errors = [error for errors in run_ranks(all_wrong, 6, list(CASES)) for error in errors]
    assert not errors, "\n".join(errors)


def test_cases_tell_conventions_apart() -> None:
    """Taking one convention for another would change a sum in the table; a case alone could not show it."""
    for other in ("partial", "identical"):
        changed = [
            name
            for name, case in CASES.items()
            if case.gradient == "partial_over_slots"
            and summed(case.have, case.need, gradients_of(case), case.groups)
            != summed(case.have, case.need, gradients_of(case), case._replace(gradient=other).groups)
        ]
        assert len(changed) >= 2, (other, changed)

"""Host values in rounds of pairs: what ranks get, and how many sockets and store requests they take."""

import re
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bench.processes.host_scale import Traffic, traffic

from longspan.comm.all_ranks import raise_first_error
from longspan.comm.control_group import PairRounds
from longspan.comm.failure_reports import FailureReports
from longspan.comm.received_signals import StopSignal, find_received_signal
from longspan.comm.world import World
from longspan.errors import CommError, DataError
from longspan.layout import Layout
from longspan.testing import run_ranks


def texts(rank: int, home: Layout) -> list[Any]:
    n = len(home.ranks)
    with World(home, backend="gloo", timeout=60) as world:
        control, joined = world.control, "".join(map(str, home.ranks))
        assert control.reduce_object(str(rank), str.__add__, "texts") == joined
        none_of_some = None if rank % 2 == 0 else str(rank)
        odd = "".join(str(r) for r in home.ranks if r % 2)
        assert control.reduce_object(none_of_some, str.__add__, "odd ranks") == (odd or None)
        assert control.reduce_object(None, str.__add__, "nothing") is None
        assert control.first_object([] if rank == n - 1 else None, "an empty list") == (n - 1, [])
        for source in range(n):
            assert control.broadcast_object({"from": rank, "size": "x" * 10**5}, source)["from"] == source
        assert control.broadcast_object(None) is None
        assert control.gather_objects(None) == [None] * n
        assert control.sum_over_ranks([]) == []
        # one order on every rank: values whose sum depends on it come out with the same bits
        sums = control.sum_over_ranks([0.1 * (rank + 1), 10.0 ** (16 - rank), -(10.0**16)])
        rounds = PairRounds(control.group, home.ranks, rank)
        return [sums, rounds.reduce(torch.tensor([rank, 1]), torch.add, "ranks").tolist()]


def of_eight(rank: int) -> tuple[list[Any], list[float]]:
    results = texts(rank, Layout(ranks=(2, 0, 1, 6, 5, 3, 4, 7)))
    with World(Layout(ranks=8, pp=2, tp=2), backend="gloo", timeout=60) as world:
        place = world.coordinates
        slots = world.control.sum_over_slots([10.0**place.slot + 100 * place.pp])
        # tensor-parallel ranks hold the same value, which counts once
        return results, slots + world.control.sum_over_stages([1.0 + place.slot + 10 * place.pp])


def test_every_rank_gets_the_same_in_the_order_of_the_home() -> None:
    of_six = run_ranks(texts, 6, Layout(ranks=(2, 0, 1, 5, 4, 3)))
    eight, of_stages = zip(*run_ranks(of_eight, 8), strict=True)
    assert [*of_stages] == [[11.0 + 200 * (rank >= 4), 26.0] for rank in range(8)]
    for n, results in ((6, of_six), (8, [*eight])):
        assert results == [results[0]] * n and results[0][1] == [n * (n - 1) // 2, n]


def differences(rank: int) -> list[str]:
    with World(Layout(ranks=4), backend="gloo", timeout=60) as world:
        world.step = 12
        with pytest.raises(CommError) as plans:
            world.control.compare_digests(("5f0c" if rank < 3 else "91ab") * 16)
        with pytest.raises(CommError, match="hold 2 different"):  # comparisons of different things meet, too
            world.control.compare_digests(
                ("5f0c" if rank < 3 else "91ab") * 16, what="plans" if rank < 3 else "weights"
            )
        with pytest.raises(DataError) as errors:
            raise_first_error(world, DataError(f"no room for {rank}") if rank in (1, 3) else None)
        raise_first_error(world, None)
        stop = StopSignal()
        assert find_received_signal(world, stop.received) == ""
        stop.received = "SIGTERM" if rank == 2 else ""
        return [str(plans.value), str(errors.value), find_received_signal(world, stop.received)]


def in_other_calls(rank: int) -> str:
    with pytest.raises(CommError) as raised, World(Layout(ranks=2), backend="gloo", timeout=60) as world:
        world.watch.timeout = 0.5
        world.control.flags_on_any_rank(False, False) if rank else world.control.flags_on_any_rank(False)
    return str(raised.value)


def of_two(rank: int) -> tuple[Any, ...]:
    return traffic_of_calls(2), requests_of_watching(), in_other_calls(rank)


@pytest.fixture(scope="module")
def two() -> list[tuple[Any, ...]]:
    return run_ranks(of_two, 2)


def test_ranks_in_different_calls_time_out_and_do_not_take_each_others_values(two: list[tuple[Any, ...]]) -> None:
    for *_, message in two:
        assert re.search("'agreement on a flag' of step 0 between ranks .0, 1. (timed out|failed)", message), message


CALLS = 10


def traffic_of_calls(ranks: int) -> tuple[Traffic, Traffic]:
    before = traffic()
    with World(Layout(ranks=ranks), backend="gloo", timeout=60) as world:
        opened = traffic() - before
        world.control.barrier()
        before = traffic()
        for _ in range(CALLS):
            world.control.compare_digests("0f" * 32)
        return opened, traffic() - before


def of_four(rank: int) -> tuple[tuple[Traffic, Traffic], list[str]]:
    return traffic_of_calls(4), differences(rank)


def test_sockets_and_messages_grow_with_the_rounds_and_differences_are_named(two: list[tuple[Any, ...]]) -> None:
    four, texts_of_four = zip(*run_ranks(of_four, 4), strict=True)
    for ranks, rounds, of_ranks in ((2, 1, [sent for sent, *_ in two]), (4, 2, four)):
        for opened, calls in of_ranks:
            assert opened.peer_sockets == rounds + ranks - 1, "the rounds' pairs, and all pairs for tensors of a CPU"
            assert calls.peer_sockets == 0
            assert CALLS * rounds * 3 <= calls.peer_messages <= CALLS * rounds * 4 + 4
    plans = (
        "the ranks hold 2 different plans for step 12: ranks (0, 1, 2) hold 5f0c5f0c5f0c…; ranks (3) hold "
        "91ab91ab91ab…. A plan must be made from the same lengths and settings on every rank"
    )
    assert [*texts_of_four] == [[plans, "no room for 1 (on rank 1)", "SIGTERM"]] * 4


def requests_of_watching() -> tuple[int, list[str]]:
    asked, has_departure_or_request = list[str](), FailureReports.has_departure_or_request

    def counted(self: FailureReports) -> bool:
        asked.append("news")
        return has_departure_or_request(self)

    with (
        patch.object(FailureReports, "has_departure_or_request", counted),
        World(Layout(ranks=2), backend="gloo", timeout=60) as world,
    ):
        world.control.barrier()
        before, asked[:] = traffic(), []
        time.sleep(0.6)
        requests = (traffic() - before).store_messages
        return requests - len(asked), asked[:1]


def test_watching_takes_one_store_request_at_a_time(two: list[tuple[Any, ...]]) -> None:
    for _, (more, asked), _ in two:
        assert -2 <= more <= 2 and asked == ["news"]

"""Hosts that latency shows: for any numbering of ranks, from O(ranks) messages, against those of the launcher."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from longspan.bench.calibrate import command
from longspan.bench.calibrate.boundary import (
    Boundary,
    check_boundary,
    cluster_ranks,
    launcher_hosts,
    measure_boundary,
    measure_steady_boundary,
)
from longspan.bench.calibrate.ranks import CalibrationSettings, Measured, calibrate_ranks
from longspan.cli.main import main
from longspan.comm.groups.channel import Channel
from longspan.errors import CommError
from longspan.plan import Machine
from longspan.plan.cost.links import KINDS, SHARDED_KINDS
from longspan.testing import run_ranks

LATENCY = 20e-3  # seconds, of messages between hosts; far above what a busy machine adds to its fastest message
BLOCKS = ((0, 1, 2, 3), (4, 5, 6, 7))
ROUND_ROBIN = ((0, 2, 4, 6), (1, 3, 5, 7))


class Network:
    """Seconds of messages between ranks on these hosts, with noise; counts what is measured."""

    def __init__(self, hosts: tuple[tuple[int, ...], ...], far: float = 3e-4, noise: float = 0.2) -> None:
        self.host = {rank: i for i, host in enumerate(hosts) for rank in host}
        self.far, self.noise, self.messages = far, noise, 0
        self.random = np.random.default_rng(1)

    def measure(self, pivot: int) -> dict[int, float]:
        others = [rank for rank in self.host if rank != pivot]
        self.messages += len(others)
        exact = {rank: 2e-5 if self.host[rank] == self.host[pivot] else self.far for rank in others}
        return {rank: time * (1 + self.noise * self.random.random()) for rank, time in exact.items()}


@pytest.mark.parametrize("hosts", [BLOCKS, ROUND_ROBIN, ((0, 1, 2), (3, 4, 5), (6, 7)), ((0, 7), (1, 2, 3, 4, 5, 6))])
def test_hosts_are_found_however_ranks_are_numbered(hosts: tuple[tuple[int, ...], ...]) -> None:
    assert measure_boundary(8, Network(hosts).measure) == Boundary(hosts)


def test_many_ranks_need_messages_to_a_few_pivots() -> None:
    hosts = launcher_hosts(4096, 8)
    network = Network(hosts)
    boundary = measure_boundary(4096, network.measure)
    assert network.messages == 8 * 4095
    assert len(boundary.hosts) == 8 and set(boundary.hosts) <= set(hosts) and len(boundary.others) == 4096 - 64
    assert check_boundary(boundary, 4096, 8) == "hosts: 512 of 8 ranks, by messages between ranks and by the launcher"


@pytest.mark.parametrize("far", [2e-5, 3e-5])
def test_latency_that_does_not_tell_leaves_the_launchers_hosts(far: float) -> None:
    boundary = measure_boundary(8, Network(BLOCKS, far).measure)
    assert boundary == Boundary(())
    line = check_boundary(boundary, 8, 4)
    assert line.startswith("hosts: 2 of 4 ranks, as the launcher counts them; messages between ranks take about the ")
    assert check_boundary(Boundary(()), 1, 1).startswith("hosts: 1 of 1 ranks, as the launcher counts them; there is ")


def test_pivots_that_contradict_each_other_tell_nothing() -> None:
    assert cluster_ranks(2, {0: {1: 1e-5}, 1: {0: 9e-5}}) == Boundary(())
    near, far = 1e-5, 9e-5
    assert cluster_ranks(3, {0: {1: near, 2: far}, 2: {0: far, 1: near}}) == Boundary(())


def test_one_slow_message_is_no_host() -> None:
    measured = {0: {1: 1e-5, 2: 1.9e-5, 3: 4e-5}, 3: {0: 1.2e-5, 1: 1e-5, 2: 1e-5}}
    assert cluster_ranks(4, measured) == Boundary(())


def test_the_launcher_agrees_or_both_are_named() -> None:
    line = check_boundary(measure_boundary(8, Network(BLOCKS).measure), 8, 4)
    assert line == "hosts: 2 of 4 ranks, by messages between ranks and by the launcher"
    message = (
        r"messages are short between ranks \(0, 2, 4, 6\), \(1, 3, 5, 7\), and the launcher has hosts of ranks "
        r"\(0, 1, 2, 3\), \(4, 5, 6, 7\) \(LOCAL_WORLD_SIZE 4\).*numbered host by host"
    )
    with pytest.raises(CommError, match=message):
        check_boundary(measure_boundary(8, Network(ROUND_ROBIN).measure), 8, 4)
    with pytest.raises(CommError, match=r"the launcher has hosts of ranks \(0, 1, 2, 3, 4, 5, 6, 7\)"):
        check_boundary(measure_boundary(8, Network(BLOCKS).measure), 8, 8)  # LOCAL_WORLD_SIZE is not set


@pytest.mark.parametrize("spells", [1, 3])
def test_a_rank_that_is_slow_for_a_while_is_measured_again(spells: int) -> None:
    network, calls = Network(BLOCKS), {"left": spells}

    def measure(pivot: int) -> dict[int, float]:
        slow = calls["left"] > 0 and 0 in (pivot, 1)
        seconds = {rank: 3e-3 if slow and 0 in (pivot, rank) else time for rank, time in network.measure(pivot).items()}
        calls["left"] -= pivot == 0
        return seconds

    assert measure_steady_boundary(8, 4, measure) == Boundary(BLOCKS)


def test_hosts_that_are_numbered_otherwise_are_found_again_and_again() -> None:
    network = Network(ROUND_ROBIN)
    boundary = measure_steady_boundary(8, 4, network.measure)
    assert boundary == Boundary(ROUND_ROBIN) and network.messages == 4 * 2 * 7


def _calibrate_two_hosts(rank: int, settings: CalibrationSettings) -> Measured:
    """Calibrate as one of two ranks of a host; messages to the other host take `LATENCY` more."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    exchange = Channel.exchange

    def exchange_late(channel: Channel, sends: Any, receives: Any, *others: Any, **named: Any) -> Any:
        peers = {channel.ranks[member] for member, _ in (*sends, *receives)}
        if any(peer // 2 != rank // 2 for peer in peers):
            time.sleep(LATENCY)
        return exchange(channel, sends, receives, *others, **named)

    def sum_gradients(*_: Any) -> None:
        raise AssertionError("a step that is measured sums gradients between the hosts")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "exchange", exchange_late)
        patch.setattr(_fsdp_param_group, "foreach_reduce", sum_gradients)
        return calibrate_ranks(rank, settings)


def test_calibration_finds_two_hosts_and_measures_what_is_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over a slow link between two torchruns: tests/launch/test_two_nodes.py, in `make test-all`."""
    monkeypatch.setattr(command, "run_on_ranks", lambda _, args, n: run_ranks(_calibrate_two_hosts, n, *args)[0])
    out = tmp_path / "machine.json"
    sizes = ["--tokens=16,32", "--document=8", "--lengths=16,48", "--micro_batches=1,2", "--warmup=0", "--repeats=1"]
    assert main(["bench", "calibrate", "--world", "4", *sizes, "--out", str(out)]) == 0
    assert "\nhosts: 2 of 2 ranks, by messages between ranks and by the launcher\n" in capfd.readouterr().out
    machine = Machine.from_json(json.loads(out.read_text()))
    assert (machine.world, machine.node_size) == (4, 2) and not {"inside", "across"} & {*machine.assumed_parts}
    assert set(machine.across.wires()) == {*KINDS, *SHARDED_KINDS}
    assert float(machine.inside.point.seconds(64)) < LATENCY < float(machine.across.point.seconds(64))

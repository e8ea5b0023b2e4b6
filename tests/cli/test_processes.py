"""How many processes a verb has, on which devices, and what it says of them, with made-up numbers of GPUs and cores."""

import os
from typing import Any

import pytest

from longspan.cli import processes
from longspan.cli.main import main
from longspan.cli.processes import Processes, choose_processes
from longspan.errors import ConfigError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "8"}
CASES: list[tuple[int, dict[str, str], dict[str, Any], Processes]] = [
    (0, {}, {"world": 0}, Processes(1, "gloo")),
    (0, {}, {"world": 2}, Processes(2, "gloo")),
    (0, {}, {"world": 3}, Processes(3, "gloo", "3 processes on 2 cores: they take turns, so a step takes longer than")),
    (1, {}, {"world": 0}, Processes(1, "nccl", "1 process on 1 GPU")),
    (4, {}, {"world": 0}, Processes(4, "nccl", "4 processes, one on each GPU; --world N starts N of them")),
    (4, {}, {"world": 0, "on_gpus": 1}, Processes(1, "nccl", "1 process, one GPU each; 3 of 4 GPUs idle, --world 4")),
    (4, {}, {"world": 3}, Processes(3, "nccl", "3 processes, one GPU each; 1 of 4 GPUs idle, --world 4 uses all")),
    (4, {}, {"world": 4, "device": "cuda"}, Processes(4, "nccl", "4 processes, one on each GPU")),
    (4, {}, {"world": 2, "device": "cpu"}, Processes(2, "gloo")),
    (0, {}, {"world": 0, "on_cpus": 2}, Processes(2, "gloo")),
    (4, TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, {"world": 0}, Processes(8, "nccl")),
    (
        8,
        TORCHRUN | {"LOCAL_WORLD_SIZE": "4"},
        {"world": 0},
        Processes(8, "nccl", "4 of 8 GPUs used, 4 idle: torchrun --n"),
    ),
    (4, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, {"world": 0, "device": "cpu"}, Processes(8, "gloo")),
]
REFUSED: list[tuple[int, dict[str, str], dict[str, Any], str]] = [
    (4, {}, {"world": 8}, "8 processes on this machine need a GPU each, and it has 4 GPUs; start at most 4, or give "),
    (4, TORCHRUN, {"world": 0}, "8 processes on this machine need a GPU each, and it has 4 GPUs; .* --device cpu"),
    (4, {}, {"world": 8, "for_cpus": "--backend gloo"}, "or give --backend gloo for processes on CPUs"),
    (0, {}, {"world": 2, "device": "cuda"}, "torch finds no GPU here, and GPUs are asked for; use --device cpu"),
    (0, {}, {"world": -1}, "--world is -1"),
    (0, TORCHRUN, {"world": 2}, "--world 2 starts processes, but torchrun has started 8; leave it out"),
]


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _here(monkeypatch: pytest.MonkeyPatch, gpus: int, variables: dict[str, str]) -> None:
    monkeypatch.setattr(processes, "usable_gpus", lambda: gpus)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("gpus", "variables", "asked", "expected"), CASES, ids=str)
def test_processes(
    gpus: int, variables: dict[str, str], asked: dict[str, Any], expected: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    _here(monkeypatch, gpus, variables)
    chosen = choose_processes(**asked)
    assert (chosen.ranks, chosen.backend) == (expected.ranks, expected.backend)
    assert chosen.note.startswith(expected.note) and bool(chosen.note) == bool(expected.note)


def test_a_home_that_does_not_fit_all_gpus_says_where_their_number_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _here(monkeypatch, 3, {})
    assert main(["train", "--context.context_parallel_size", "2"]) == 2
    out, error = capsys.readouterr()
    assert not out and "does not divide 3 slots" in error
    assert error.splitlines()[1:] == ["  3 processes, one on each GPU; --world N starts N of them"]


@pytest.mark.parametrize(("gpus", "variables", "asked", "message"), REFUSED, ids=str)
def test_processes_that_cannot_be(
    gpus: int, variables: dict[str, str], asked: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _here(monkeypatch, gpus, variables)
    with pytest.raises(ConfigError, match=message):
        choose_processes(**asked)

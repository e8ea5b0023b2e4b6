"""How many processes a verb has, on which devices, and what it says of them, with made-up numbers of GPUs and cores."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from longspan.bench.benches import BenchFlags
from longspan.cli import main as command
from longspan.cli import processes
from longspan.cli.main import main
from longspan.cli.processes import Processes, choose_processes
from longspan.errors import ConfigError
from longspan.launch import fork_server

TORCHRUN, ON_4 = {"RANK": "1", "WORLD_SIZE": "8"}, {"LOCAL_WORLD_SIZE": "4"}
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
    (4, TORCHRUN | ON_4, {"world": 0}, Processes(8, "nccl")),
    (8, TORCHRUN | ON_4, {"world": 0}, Processes(8, "nccl", "4 of 8 GPUs used, 4 idle: torchrun --n")),
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


@pytest.mark.parametrize(
    ("gpus", "world", "variables", "expected"),
    [
        (0, 0, {}, (3, "gloo")),
        (4, 0, {}, (4, "nccl")),
        (4, 2, {}, (2, "nccl")),
        (4, 0, TORCHRUN | ON_4, (8, "nccl")),
    ],
)
def test_processes_of_a_bench(
    gpus: int, world: int, variables: dict[str, str], expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _here(monkeypatch, gpus, variables)
    assert BenchFlags(world=world).processes(without_gpus=3) == expected
    if not variables:
        assert BenchFlags(world=world, device="cpu").processes(without_gpus=3) == (world or 3, "gloo")


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


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What happens, in order: the server begins and ends, and the verb is imported."""
    noted = list[object]()

    @contextmanager
    def note_server(environment: Mapping[str, str]) -> Iterator[None]:
        noted.append(dict(environment))
        try:
            yield
        finally:
            noted.append("end")

    def note_verb(name: str) -> None:
        noted.append(name)
        raise ConfigError("a flag that is refused")

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fork_server, "imports_for_ranks", note_server)
    monkeypatch.setattr(command, "import_module", note_verb)
    return noted


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_the_server_begins_before_the_verb_and_ends_after_its_error(
    verb: str, events: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["longspan", "--debug", verb, "run.toml"])
    assert command.main() == 2
    assert events == [{"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, f"longspan.cli.{verb}", "end"]
    events.clear()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert command.main() == 2
    assert events[0] == {}, "what the user has set stands"


@pytest.mark.parametrize(
    "words", ["plan a.toml", "train --help", "train a --dry-run", "train a --dry_run", "eval -h", ""]
)
def test_commands_without_ranks_of_their_own_begin_no_server(
    words: str, events: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not words:
        monkeypatch.setenv("RANK", "0")  # torchrun's
    monkeypatch.setattr(sys, "argv", ["longspan", *(words or "train a.toml").split()])
    assert command.main() == 2
    assert events == [f"longspan.cli.{(words or 'train').split()[0]}"]


def test_a_caller_of_main_begins_no_server(events: list[object]) -> None:
    assert command.main(["train", "run.toml"]) == 2
    assert events == ["longspan.cli.train"]

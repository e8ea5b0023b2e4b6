"""How many processes a verb has and on which devices; GPUs as CUDA's driver counts them, and what ranks find."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan.bench.benches import BenchFlags
from longspan.cli import machine as gpus, main as command, processes
from longspan.cli.machine import NO_GPUS, LocalGpus, find_gpus, machine_facts, machine_text, set_gpu_environment
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
    monkeypatch.setattr(processes, "set_gpu_environment", lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("gpus", "variables", "asked", "expected"), CASES, ids=str)
def test_processes(
    gpus: int, variables: dict[str, str], asked: dict[str, Any], expected: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    _here(monkeypatch, gpus, variables)
    calls = list[str]()
    monkeypatch.setattr(processes, "set_gpu_environment", lambda: calls.append("set"))
    chosen = choose_processes(**asked)
    assert (chosen.ranks, chosen.backend) == (expected.ranks, expected.backend)
    assert calls == ["set"] * (chosen.backend == "nccl")
    assert chosen.note.startswith(expected.note) and bool(chosen.note) == bool(expected.note)


def test_processes_of_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BenchFlags().choose_processes(on_cpus=3) == (3, "gloo")
    _here(monkeypatch, 4, {})
    assert BenchFlags(world=2).choose_processes(on_cpus=3) == (2, "nccl")
    assert BenchFlags(device="cpu").choose_processes(on_cpus=3) == (3, "gloo")


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
    monkeypatch.setattr(fork_server, "import_for_ranks", note_server)
    monkeypatch.setattr(command, "import_module", note_verb)
    return noted


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_the_server_begins_before_the_verb(verb: str, events: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_no_server_without_ranks(words: str, events: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    if not words:
        monkeypatch.setenv("RANK", "0")  # torchrun's
    monkeypatch.setattr(sys, "argv", ["longspan", *(words or "train a.toml").split()])
    assert command.main() == 2
    assert events == [f"longspan.cli.{(words or 'train').split()[0]}"]


def test_a_caller_of_main_begins_no_server(events: list[object]) -> None:
    assert command.main(["train", "run.toml"]) == 2
    assert events == ["longspan.cli.train"]


# ---- GPUs as CUDA's driver counts them, what ranks find in their environment, and commands that import no torch


def driver_of(count: int, error: int = 0) -> SimpleNamespace:
    """As ctypes shows libcuda: functions write their answers through references, and return an error's number."""

    def write(into: Any, value: int) -> int:
        into._obj.value = value
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: error,
        cuDeviceGetCount=lambda into: write(into, count),
        cuDeviceGetAttribute=lambda into, attribute, device: write(into, {75: 9, 76: 0, 16: 132}[attribute]),
        cuDeviceTotalMem_v2=lambda into, device: write(into, 150 << 30),
        cuDeviceGetName=lambda name, size, device: setattr(name, "value", b"NVIDIA H200"[:size]),
    )


BUILDS: list[tuple[dict[str, Any], SimpleNamespace | None, LocalGpus]] = [
    ({"cuda": "13.0", "hip": None}, driver_of(2), LocalGpus(2, (9, 0), 132, "NVIDIA H200", 150 << 30)),
    ({"cuda": "13.0"}, driver_of(0), NO_GPUS),  # CUDA_VISIBLE_DEVICES is empty
    ({"cuda": "13.0"}, driver_of(0, error=100), NO_GPUS),  # a driver without devices
    ({"cuda": "13.0"}, None, NO_GPUS),  # no driver
    ({"cuda": None, "hip": None}, driver_of(2), NO_GPUS),  # GPUs that this torch cannot use
]


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    gpus._count_gpus_by_driver.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch is asked")
@pytest.mark.parametrize(("build", "driver", "expected"), BUILDS)  # with ids that are the same in every process
def test_the_driver_is_asked_for_builds_that_use_it(
    build: dict[str, Any], driver: SimpleNamespace | None, expected: LocalGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> SimpleNamespace:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(gpus, "_torch_is_built_for", lambda driver: build.get(driver) is not None)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert find_gpus() == expected
    gpus._count_gpus_by_driver.cache_clear()


def test_torch_finds_as_many_here() -> None:
    assert find_gpus().count == torch.cuda.device_count()


MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
ON_GPUS = ["plan", "--model", "model", "--gpu", "h100", "--gpus", "2", "--json"]
WITHOUT_TORCH: tuple[tuple[list[str], int, str], ...] = (  # commands, their status, and what they say
    (["train", "--help"], 0, "longspan train"),
    (["eval", "--help"], 0, "longspan eval"),
    (["plan", "--same", "4x900", "--slots", "4", "--json"], 0, '"slots": 4'),
    (["plan", "--compare", "--slots", "2", "--same", "2x900"], 0, "fixed, cp 1"),
    ([*ON_GPUS, "--same", "2x9000", "--cp", "2", "--optimizer.class", "sgd", "--lora.rank", "2"], 0, '"lora.rank": 2'),
    ([*ON_GPUS, "--data", "texts", "--cp", "1"], 0, '"steps": '),
    (["train", "--trian.steps", "3"], 2, "did you mean '--train.steps'"),
    (["train", "bad.toml"], 2, "did you mean 'train.steps'"),
    (["train", "--context.attention_kernel", "flsh", "--world", "2"], 2, "'flsh'"),
    (["train", "--context.context_parallel_size", "3", "--world", "2"], 2, "3 does not divide 2 slots"),
    (["train", "--parallel.tp", "3", "--world", "2"], 2, "2 ranks are not divisible by tp 3"),
    (["train", "--optimizer.lr", "-2", "--world", "2"], 2, "optimizer.lr is -2"),
    (["train", "--model.path", "nowhere", "--optimizer.lr", "1e-5"], 2, "model.path 'nowhere' does not exist"),
    (["train", "--data.path", "no.jsonl", "--world", "2"], 2, "data.path 'no.jsonl' does not exist"),
    (["train", "--data.tokenizer", "nowhere", "--world", "2"], 2, "nowhere"),
)
SCRIPT = """
import contextlib, io, sys
from longspan.cli.main import main
HEAVY = {"torch", "transformers", "triton", "scipy", "sklearn", "torchvision", "pandas", "matplotlib", "datasets"}
import longspan.report.follow, longspan.cli.report, longspan.cli.train, longspan.cli.eval
assert not HEAVY & {*sys.modules}, "a launcher or a follower imports what ranks alone need"
for words, status, says in eval(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        try:
            found = main(words)
        except SystemExit as left:
            found = left.code
    imported = {"torch", "transformers"} & {*sys.modules}
    assert found == status and says in text.getvalue() and not imported, (words, found, imported, text.getvalue())
"""


def test_what_plans_helps_or_refuses_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nstepz = 3\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 1000}))
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text("x" * 30_000)
    words = [sys.executable, "-c", SCRIPT, repr(WITHOUT_TORCH)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


NAMES = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"),
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key not in NAMES})
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpus, "find_gpus", lambda: LocalGpus(2, (9, 0)))
    return tmp_path / "longspan" / "kernels"


def test_kernels_are_kept_in_the_users_cache(gpu: Path) -> None:
    set_gpu_environment()
    assert gpu.is_dir()
    alloc, folders = (
        ["expandable_segments:True", None],
        [gpu / "triton", gpu / "inductor", gpu / "flash_attention-sm90"],
    )
    assert [os.environ.get(name) for name in NAMES] == [*alloc, *map(str, folders), "1"]


def test_what_the_user_has_set_stands(gpu: Path) -> None:
    os.environ |= {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "TRITON_CACHE_DIR": "/mine"}
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "0"
    set_gpu_environment()
    assert "PYTORCH_ALLOC_CONF" not in os.environ and os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(gpu / "inductor")


def test_a_folder_that_cannot_be_written(gpu: Path) -> None:
    gpu.parent.parent.joinpath("longspan").write_text("")
    with pytest.raises(ConfigError, match=r"kept in .*/longspan/kernels: Not a directory; set XDG_CACHE_HOME"):
        set_gpu_environment()


def test_nothing_is_set_without_gpus(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpus", lambda: NO_GPUS)
    set_gpu_environment()
    assert not gpu.exists() and not any(name in os.environ for name in NAMES)


HOST = {"processor": "A processor", "cores": 64, "memory_bytes": 512 * 2**30, "system": "Linux x86_64"}
WITH_GPUS = {"cuda": "13.0", "cudnn": 91300, "nccl": "2.28.3", "gpu_memory_bytes": 2**37}


def test_a_machine_in_one_line() -> None:
    host = "64 cores of A processor, 512 GiB"
    assert machine_text(HOST) == host
    with_gpus = HOST | WITH_GPUS | {"gpus": ["H200", "H200", "L4"]}
    assert machine_text(with_gpus) == f"2 x H200 and 1 x L4 (CUDA 13.0, cuDNN 91300, NCCL 2.28.3); {host}"
    facts = machine_facts()
    assert facts["cores"] >= 1 and facts["memory_bytes"] > 2**20 and facts["processor"]
    assert f"{facts['cores']} cores of {facts['processor']}" in machine_text(facts)

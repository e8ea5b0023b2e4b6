"""GPUs as CUDA's driver counts them, by a fake driver; and keys that are refused before torch is imported."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan.attention import KERNELS
from longspan.cli import machine as gpus
from longspan.cli.machine import NO_GPUS, LocalGpus, find_gpus
from longspan.run.checks import ATTENTION_KERNELS


def driver_of(count: int, error: int = 0) -> SimpleNamespace:
    """As ctypes shows libcuda: functions write their answers through references, and return an error's number."""

    def write(into: Any, value: int) -> int:
        into._obj.value = value
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: error,
        cuDeviceGetCount=lambda into: write(into, count),
        cuDeviceGetAttribute=lambda into, attribute, device: write(into, {75: 9, 76: 0, 16: 132}[attribute]),
    )


BUILDS: list[tuple[dict[str, Any], SimpleNamespace | None, LocalGpus]] = [
    ({"cuda": "13.0", "hip": None}, driver_of(2), LocalGpus(2, (9, 0), 132)),
    ({"cuda": "13.0"}, driver_of(0), NO_GPUS),  # CUDA_VISIBLE_DEVICES is empty
    ({"cuda": "13.0"}, driver_of(0, error=100), NO_GPUS),  # a driver without devices
    ({"cuda": "13.0"}, None, NO_GPUS),  # no driver
    ({"cuda": None, "hip": None}, driver_of(2), NO_GPUS),  # GPUs that this torch cannot use
]


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    gpus._driver_gpus.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch is asked")
@pytest.mark.parametrize(("build", "driver", "expected"), BUILDS)  # with ids that are the same in every process
def test_the_driver_is_asked_for_builds_that_use_it(
    build: dict[str, Any], driver: SimpleNamespace | None, expected: LocalGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> SimpleNamespace:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(gpus, "_has_build", lambda driver: build.get(driver) is not None)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert find_gpus() == expected
    gpus._driver_gpus.cache_clear()


def test_torch_finds_as_many_here() -> None:
    assert find_gpus().count == torch.cuda.device_count()


WRONG = (
    ["--trian.steps", "3"],
    ["bad.toml"],
    ["--context.attention_kernel", "flsh", "--world", "2"],
    ["--context.context_parallel_size", "3", "--world", "2"],
    ["--parallel.tp", "3", "--world", "2"],
    ["--train.lr", "-2", "--world", "2"],
    ["--model.path", "nowhere", "--train.lr", "1e-5"],
    ["--data.path", "nowhere.jsonl", "--context.eval_context_parallel_size", "2", "--world", "2"],
    ["--data.tokenizer", "nowhere", "--context.eval_context_parallel_size", "2", "--world", "2"],
)
SCRIPT = """
import sys
from longspan.cli.main import main
for words in eval(sys.argv[1]):
    if (status := main(["train", *words])) != 2 or {"torch", "transformers"} & {*sys.modules}:
        sys.exit(f"{words}: {status}, {sorted({'torch', 'transformers'} & {*sys.modules})}")
"""


def test_wrong_keys_and_missing_files_are_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nstepz = 3\n")
    words = [sys.executable, "-c", SCRIPT, repr(WRONG)]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error:") == len(WRONG)
    assert "model.path 'nowhere' does not exist" in done.stderr
    assert "data.path 'nowhere.jsonl' does not exist" in done.stderr


def test_names_of_kernels_are_those_of_their_table() -> None:
    assert [kernel.name for kernel in KERNELS] == [*ATTENTION_KERNELS]

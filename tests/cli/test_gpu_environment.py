"""What ranks on GPUs find in their environment; GPUs are made up."""

import os
from pathlib import Path

import pytest

from longspan.cli import machine as gpu_environment
from longspan.cli.machine import NO_GPUS, LocalGpus, set_gpu_environment
from longspan.errors import ConfigError

NAMES = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"),
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with H200s, an empty environment and a cache of the user's."""
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key not in NAMES})
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_environment, "find_gpus", lambda: LocalGpus(2, (9, 0)))
    return tmp_path / "longspan" / "kernels"


def test_kernels_are_kept_in_the_users_cache(gpu: Path) -> None:
    set_gpu_environment()
    assert gpu.is_dir()
    assert {name: os.environ.get(name) for name in NAMES} == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": None,
        "TRITON_CACHE_DIR": str(gpu / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(gpu / "inductor"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(gpu / "flash_attention-sm90"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }


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
    monkeypatch.setattr(gpu_environment, "find_gpus", lambda: NO_GPUS)
    set_gpu_environment()
    assert not gpu.exists() and not any(name in os.environ for name in NAMES)

"""What the environment of ranks on GPUs says: where compiled kernels are kept, and how memory is taken from the driver.

It is set before the ranks start, or under torchrun before this rank asks for its GPU. What the user has set stands.
"""

import os
from pathlib import Path

from longspan.cli.gpus import find_gpus
from longspan.errors import ConfigError

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9 and later read the first before the second


def set_gpu_environment(compile_cache: str = "") -> None:
    """Have kernels kept in a folder across runs ("": the user's cache) and segments of memory grow; nothing on CPUs.

    Growing segments hold micro-batches of different sizes without gaps, for which the allocator would otherwise free
    and ask again. Raises ConfigError where the folder cannot be written.
    """
    gpus = find_gpus()
    if not gpus.count:
        return
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    folder = _writable(cache_folder(compile_cache))
    major, minor = gpus.capability
    folders = {
        "TRITON_CACHE_DIR": folder / "triton",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
        # FlashAttention-4 (4.0.0b36) does not tell GPUs apart in the names of all its kernels.
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": folder / f"flash_attention-sm{major}{minor}",
    }
    for name, path in folders.items():
        os.environ.setdefault(name, str(path))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def cache_folder(compile_cache: str = "") -> Path:
    """The folder of compiled kernels: the one named, or longspan/kernels in the user's cache (XDG_CACHE_HOME)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(compile_cache).expanduser().absolute() if compile_cache else cache / "longspan" / "kernels"


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise ConfigError(f"{_cannot(folder)}: {error.strerror}; {_INSTEAD}") from error
    if not writable:
        raise ConfigError(f"{_cannot(folder)}: it is not writable for this user; {_INSTEAD}")
    return folder


_INSTEAD = "name another folder with run.compile_cache, or set XDG_CACHE_HOME"


def _cannot(folder: Path) -> str:
    return f"compiled kernels cannot be kept in {folder}"

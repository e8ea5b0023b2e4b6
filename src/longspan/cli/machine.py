"""This machine: its GPUs, the environment that they need, and facts for `doctor` and records, without host names.

CUDA's driver counts the GPUs, so that a launcher need not import torch; CUDA_VISIBLE_DEVICES counts, and no memory is
taken. The environment is set before a rank uses its GPU; what the user has set stays.
"""

import ctypes
import os
import platform
import runpy
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from longspan.errors import ConfigError
from longspan.host import usable_cores

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, and _MULTIPROCESSOR_COUNT
_ATTRIBUTES = (75, 76, 16)


@dataclass(frozen=True)
class LocalGpus:
    """How many GPUs torch can use; of the first the compute capability, and multiprocessors, name and bytes if the
    driver was asked (0 and "": not known).
    """

    count: int
    capability: tuple[int, int]
    multiprocessors: int = 0
    name: str = ""
    bytes: int = 0


NO_GPUS = LocalGpus(0, (0, 0))


def find_gpus() -> LocalGpus:
    """Return the GPUs that torch can use here.

    On Linux CUDA's driver counts them for a build of torch for CUDA, and a build for CPUs can use none. For a build for
    AMD, and on other systems, torch itself is imported to count them.
    """
    if sys.platform == "linux" and not _torch_is_built_for("hip"):
        return _count_gpus_by_driver() if _torch_is_built_for("cuda") else NO_GPUS
    import torch

    if not torch.cuda.is_available():
        return NO_GPUS
    return LocalGpus(torch.cuda.device_count(), torch.cuda.get_device_capability())


@cache
def _count_gpus_by_driver() -> LocalGpus:
    """CUDA's driver needs no torch; its functions return 0 where they succeed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver is installed
        return NO_GPUS
    count = ctypes.c_int()
    numbers = (ctypes.c_int(), ctypes.c_int(), ctypes.c_int())
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return NO_GPUS
    for number, attribute in zip(numbers, _ATTRIBUTES, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)  # the first device is number 0
    major, minor, multiprocessors = (number.value for number in numbers)
    name = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t()
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), 0)
    driver.cuDeviceGetName(name, len(name), 0)
    return LocalGpus(count.value, (major, minor), multiprocessors, name.value.decode(errors="replace"), size.value)


@cache
def _torch_is_built_for(toolkit: Literal["cuda", "hip"]) -> bool:
    """By version.py alone: a launcher may not import torch, which takes seconds, to learn this."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get(toolkit) is not None


# torch 2.9 and later read the first before the second
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_environment() -> dict[str, str]:
    """Return the variable, with its value, that lets segments of GPUs' memory grow; {} where the user has set one."""
    if any(name in os.environ for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def set_gpu_environment() -> None:
    """Set the variables that keep compiled kernels across runs and let segments of GPU memory grow, where the user has
    not set them; without GPUs nothing is set.

    Kernels are kept in longspan/kernels of the user's cache (XDG_CACHE_HOME). In growing segments micro-batches of
    different sizes leave no gaps; gaps would make the allocator free memory and ask for it again. Raises ConfigError
    where kernels cannot be kept.
    """
    gpus = find_gpus()
    if not gpus.count:
        return
    os.environ.update(allocator_environment())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "longspan" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else "it is not writable for this user"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise ConfigError(
            f"compiled kernels cannot be kept in {folder}: {reason}; set XDG_CACHE_HOME to another folder"
        )
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


def machine_facts() -> dict[str, Any]:
    """Return the processor, cores, bytes of memory and system, and of GPUs their names, bytes and libraries."""
    import torch
    from torch.cuda import nccl

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # the system does not say
        memory = 0
    facts: dict[str, Any] = {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["nccl"] = ".".join(map(str, nccl.version()))
    return facts


def machine_text(facts: dict[str, Any]) -> str:
    """Write the facts of `machine_facts` on one line."""
    gpus = facts.get("gpus", [])
    memory = f"{facts['memory_bytes'] / 2**30:.0f} GiB"
    host = f"{facts['cores']} cores of {facts['processor']}, {memory}"
    if not gpus:
        return host
    names = " and ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return f"{names} (CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}); {host}"

"""The GPUs of this machine as CUDA's driver counts them: a launcher need not wait for torch to be imported.

CUDA_VISIBLE_DEVICES counts, for the driver reads it too. No context is made, and no memory of a GPU is taken.
"""

import ctypes
import runpy
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclass(frozen=True)
class Gpus:
    """How many GPUs torch can use, and the compute capability of the first."""

    count: int
    capability: tuple[int, int]


NONE = Gpus(0, (0, 0))


def find_gpus() -> Gpus:
    """What torch would find; torch itself is asked where its build is for another driver than CUDA's on Linux."""
    if sys.platform == "linux" and not _built_for("hip"):
        return _of_driver() if _built_for("cuda") else NONE
    import torch

    if not torch.cuda.is_available():
        return NONE
    return Gpus(torch.cuda.device_count(), torch.cuda.get_device_capability())


@cache
def _of_driver() -> Gpus:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver is installed
        return NONE
    count, capability = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return NONE
    for number, attribute in zip(capability, _CAPABILITY, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)  # the first device is number 0
    return Gpus(count.value, (capability[0].value, capability[1].value))


@cache
def _torch_build() -> dict[str, Any]:
    """What torch says of its own build, read without importing it."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def _built_for(platform: str) -> bool:
    return _torch_build().get(platform) is not None

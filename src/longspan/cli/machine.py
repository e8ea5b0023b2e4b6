"""What this machine is, for `doctor` and for the records of `bench`. No host names."""

import os
import platform
from pathlib import Path
from typing import Any

from longspan.launch.launch import usable_cores


def machine() -> dict[str, Any]:
    """Processor, memory and GPUs, as a JSON object."""
    import torch
    from torch.cuda import nccl

    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
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
    """One line about a machine."""
    gpus = facts.get("gpus", [])
    memory = f"{facts['memory_bytes'] / 2**30:.0f} GiB"
    host = f"{facts['cores']} cores of {facts['processor']}, {memory}"
    if not gpus:
        return host
    names = " and ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return f"{names} (CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}); {host}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0

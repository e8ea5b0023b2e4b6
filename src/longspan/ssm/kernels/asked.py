"""Packages whose kernels are used only where they are asked for by name, and what they lack here."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from longspan.errors import LayoutError
from longspan.ssm.kernels.fla import numbers

TORCH_ALONE = "torch"
# Of scans without a delta term, and of convolutions: where each was tried.
PACKAGES = {
    "mamba_ssm": "tried on one H200",
    "causal_conv1d": "its CUDA code untried",
}


def lacks_package(name: str, needed: tuple[int, int], device: torch.device) -> str:
    """What is missing for a package's kernels: CUDA, the package, or that version of it; "" for nothing."""
    if device.type != "cuda":
        return f"cuda tensors, got {device.type}"
    return _installed(name, needed)


@cache
def _installed(name: str, needed: tuple[int, int]) -> str:
    wanted = ".".join(map(str, needed))
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} {wanted}, which is not installed: pip install '{name}=={wanted}.*'"
    return "" if numbers(found)[:2] == needed else f"{name} {wanted}, and {found} is installed"


def refuse(name: str, lacking: str) -> None:
    """Raises LayoutError where a kernel that was asked for lacks something."""
    if lacking:
        raise LayoutError(f"the kernel {name} of state-space layers was asked for and needs {lacking}; leave it out")


def check_names(asked: Sequence[str]) -> None:
    """Raises LayoutError for names that are no kernels, or that exclude each other."""
    known = (TORCH_ALONE, *PACKAGES)
    for name in asked:
        if name not in known:
            raise LayoutError(f"{name!r} is no kernel of state-space layers; use {', '.join(known)}")
    if TORCH_ALONE in asked and len(set(asked)) > 1:
        raise LayoutError(f"kernels of state-space layers are {', '.join(asked)}; give torch alone, or without it")

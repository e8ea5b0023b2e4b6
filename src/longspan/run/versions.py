"""Versions of the installed packages, which records of runs and measurements keep. None of them is imported."""

import platform
from importlib.metadata import PackageNotFoundError, version

from longspan import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "flash-attn-4")


def versions() -> dict[str, str]:
    """Python and the packages that results depend on; those that are not installed are left out.

    >>> versions()["python"]
    """
    installed = {"python": platform.python_version(), "longspan": __version__}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed

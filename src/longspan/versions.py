"""The versions of what results depend on, for records of runs and benches and for `longspan doctor`; without torch."""

import platform
from importlib.metadata import PackageNotFoundError, version

from longspan import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "flash-attn-4")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on, as far as they are installed."""
    installed = {"python": platform.python_version(), "longspan": __version__}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed

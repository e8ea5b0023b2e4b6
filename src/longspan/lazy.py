"""What is imported on first use: names of a package (PEP 562), as planning needs no torch, and Triton's kernels."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package. Its block `if TYPE_CHECKING:` lists what it exports.

    The block is read here, from the package's text: each name is imported as itself.
    """
    module = sys.modules[package]
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    blocks = (node.body for node in ast.parse(text).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block if isinstance(node, ast.ImportFrom))
    home_of = {alias.name: str(node.module) for node in imports for alias in node.names}
    names = sorted(home_of)

    def load_name(name: str) -> object:
        """Import a name and set it in the package, where Python finds it from then on."""
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        value = getattr(import_module(home_of[name]), name)
        setattr(module, name, value)
        return value

    return load_name, lambda: sorted({*names, *vars(module)}), names


@cache
def import_triton_kernels(module: str) -> Any:
    """Import a module of Triton kernels by its dotted name; None without Triton, which CPU builds of torch lack."""
    return None if find_spec("triton") is None else import_module(module)

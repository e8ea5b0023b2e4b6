"""Names of a package that are imported on first use (PEP 562): planning, flags and process launching need no torch."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


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

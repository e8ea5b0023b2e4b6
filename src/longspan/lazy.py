"""Names of a package that are imported on first use (PEP 562): planning, flags and process launching need no torch."""

import re
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path


def lazy_exports(
    package: str, unlisted: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package: the names that it imports under `if TYPE_CHECKING:`.

    >>> if TYPE_CHECKING:
    ...     from longspan.train.step import run_step as run_step
    >>> __getattr__, __dir__, __all__ = lazy_exports(__name__)

    `unlisted` names can be imported, but stand neither in `__all__` nor in `dir`: they have moved to another place.
    No name may be that of a module of the package: importing the module would take its place.
    """
    module = sys.modules[package]
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    home_of = {name: home for home, name in re.findall(r"^    from (\S+) import (\w+) as \2$", text, re.MULTILINE)}
    names = sorted(set(home_of) - set(unlisted))

    def load(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        value = getattr(import_module(home_of[name]), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*names, *vars(module)}), names

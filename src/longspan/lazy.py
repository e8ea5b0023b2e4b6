"""Names imported on first use: a package's own (PEP 562), as planning and flags need no torch, and a user's."""

import re
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError, LongspanError


def lazy_exports(
    package: str, unlisted: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, for its imports under `if TYPE_CHECKING:`.

    The imports are found in the package's text: each is one line `from home import name as name`. The `unlisted` names
    can be imported as well, but no list shows them.
    """
    module = sys.modules[package]
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    home_of = {name: home for home, name in re.findall(r"^    from (\S+) import (\w+) as \2$", text, re.MULTILINE)}
    names = sorted(set(home_of) - set(unlisted))

    def load_name(name: str) -> object:
        """Import a name and set it in the package, where Python finds it from then on."""
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        value = getattr(import_module(home_of[name]), name)
        setattr(module, name, value)
        return value

    return load_name, lambda: sorted({*names, *vars(module)}), names


def import_object(name: str, opening: str, kind: type[LongspanError] = ConfigError) -> Any:
    """Import the object with a dotted name, such as a class of the user's own; None if its module has no such object.

    Raises an error of this kind, whose text begins with `opening`, if the module cannot be imported.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute, None)
    except Exception as error:  # whatever the module raises when it is imported
        raise kind(
            f"{opening}, and {module} cannot be imported: {type(error).__name__}: {error}; install it, or put its "
            "folder on PYTHONPATH"
        ) from error

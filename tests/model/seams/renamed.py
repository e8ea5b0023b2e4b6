"""Classes of transformers under other names: what recognises a class by its name does not know them."""

import inspect
import os
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_folder = TemporaryDirectory(prefix="longspan-renamed-")


def renamed_class(kind: type, old: str, new: str) -> Any:
    """Return a class of a copy of the module of `kind`, with `new` in place of `old` in every name but those of
    configurations.
    """
    module = sys.modules[kind.__module__]
    name = f"{kind.__module__}_{new.lower()}"
    if name not in sys.modules:
        # Ranks share the folder: each reads a file of its own.
        path = Path(_folder.name) / f"{name.rpartition('.')[2]}_{os.getpid()}.py"
        source = inspect.getsource(module).replace(old, new)
        path.write_text(re.sub(rf"\b{new}(\w*Config)\b", rf"{old}\1", source), "utf-8")
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return getattr(sys.modules[name], kind.__name__.replace(old, new))

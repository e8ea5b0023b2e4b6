"""Packages of the extra `data`, imported when a file asks for them."""

from importlib import import_module
from types import ModuleType

from longspan.errors import DataError


def needed(module: str, name: str) -> ModuleType:
    """The module that reads the file `name`. Raises DataError, with what installs it, where it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{name} is read with {package}, which is not installed: pip install 'longspan[data]'"
        ) from error

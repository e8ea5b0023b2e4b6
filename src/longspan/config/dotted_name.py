"""Objects of a user's own modules, by the dotted names that a configuration gives."""

from importlib import import_module
from typing import Any

from longspan.errors import ConfigError


def object_named(name: str, said: str) -> Any:
    """What a dotted name stands for; None where its module has no such.

    Raises ConfigError, which begins with what was `said` in the configuration, where the module cannot be imported.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute, None)
    except Exception as error:  # whatever the module raises when it is imported
        raise ConfigError(
            f"{said}, and {module} cannot be imported: {type(error).__name__}: {error}; install it, or put its folder "
            "on PYTHONPATH"
        ) from error

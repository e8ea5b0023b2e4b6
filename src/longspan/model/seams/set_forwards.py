"""Forwards that somebody else than longspan has set on a module, or wrapped around its class's.

Such a forward runs like any other when the module is called. Where longspan makes a forward of the class's code it
would be dropped: the callers refuse such a module by name.
"""

import inspect
from collections.abc import Iterable
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn


def has_forward_of_others(module: nn.Module) -> bool:
    """Return whether somebody else than longspan gave a module a forward in place of its class's.

    longspan's are functions of its modules, alone or in a `partial`, and copies of the class's code (`mixers.py`).
    """
    forward = vars(module).get("forward")
    class_forward = type(module).forward
    function = forward.func if isinstance(forward, partial) else getattr(forward, "__func__", forward)
    if function is None or function is class_forward or _defining_module(function).startswith("longspan."):
        return False
    return getattr(function, "__code__", None) is not getattr(inspect.unwrap(class_forward), "__code__", None)


def is_wrapped_by_others(module: nn.Module) -> bool:
    """Return whether the forward of a module's class has a wrapper that is not transformers' own."""
    function: Any = type(module).forward
    while hasattr(function, "__wrapped__"):
        if not _defining_module(function).startswith("transformers."):
            return True
        function = function.__wrapped__
    return False


def modules_with_instance_forward(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the modules, by name and class, to which somebody gave a forward in place of their class's."""
    return [f"{name} ({type(module).__name__})" for name, module in modules if has_forward_of_others(module)]


def _defining_module(function: Any) -> str:
    return function.__globals__["__name__"] if isinstance(function, FunctionType) else ""

"""Whose forward a module has: its class's, as transformers wrapped it, or one that somebody put in its place.

A forward set on one module (`model.forward = …`, or what accelerate's hooks put there) runs like any other where the
module is called. Where longspan makes a forward out of the class's code, or sets another in its place, it would be
dropped: such a module is refused by name, or left as it is. So is one whose class's forward was wrapped by somebody
else than transformers, where what is inside is taken out.
"""

from collections.abc import Iterable
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn


def inside_wrappers(function: Any) -> Any:
    """The innermost function of those around which others were put by `functools.wraps`."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def is_set_on_instance(module: nn.Module) -> bool:
    """Whether a module has a forward beside its class's that is none of longspan's.

    One with the code of its class's is longspan's, as a method with other names behind it (`seams/mixers.py`).
    """
    forward, in_class = vars(module).get("forward"), type(module).forward
    function = forward.func if isinstance(forward, partial) else getattr(forward, "__func__", forward)
    if function is None or function is in_class or _home(function).startswith("longspan."):
        return False
    return getattr(function, "__code__", None) is not getattr(inside_wrappers(in_class), "__code__", None)


def is_wrapped_by_others(module: nn.Module) -> bool:
    """Whether its class's forward has a wrapper that is not transformers' own."""
    function: Any = type(module).forward
    while hasattr(function, "__wrapped__"):
        if not _home(function).startswith("transformers."):
            return True
        function = function.__wrapped__
    return False


def set_on_instances(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The modules, by name and class, that have a forward beside their class's."""
    return [f"{name} ({type(module).__name__})" for name, module in modules if is_set_on_instance(module)]


def _home(function: Any) -> str:
    """The module that a function was written in, which `functools.wraps` does not copy from what is inside."""
    return function.__globals__["__name__"] if isinstance(function, FunctionType) else ""

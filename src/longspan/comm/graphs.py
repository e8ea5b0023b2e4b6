"""What communicates stays outside of compiled graphs."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(fn: Function) -> Function:
    """torch.compile ends its graph before a call of this function and begins another after it."""
    return cast(Function, torch.compiler.disable(fn))

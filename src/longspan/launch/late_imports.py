"""The fork server imports this before models: scipy, which only losses of object detection need, waits for their call.

transformers (5.17 to 5.24) imports these losses with every model, and they import scipy.optimize where scipy is
installed: 320 modules, a tenth of all that ranks import. A loss that is called imports it then. Not covered: ranks of
torchrun, which import for themselves.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any


class _LateModule(ModuleType):
    """Stands for a module: each of its functions imports the real one when it is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function that imports the real module and calls its function `name`.

        Raises AttributeError for special names, which Python's imports ask for.
        """
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return function


@contextmanager
def late_modules(*names: str) -> Iterator[None]:
    """Put stand-ins for modules while this is open: their functions import the real modules only when they are called.

    >>> with late_modules("scipy.optimize"):
    ...     import transformers.loss.loss_utils
    """
    late = {name: _LateModule(name) for name in names if name not in sys.modules}
    sys.modules.update(late)
    try:
        yield
    finally:
        for name in late:  # so that a call imports the real module
            sys.modules.pop(name, None)


with late_modules("scipy.optimize"), suppress(ImportError):  # the losses take one function from it
    import_module("transformers.loss.loss_utils")

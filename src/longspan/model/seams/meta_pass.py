"""A model's forward pass over two rows on the meta device: no memory, no values, and nothing of the model changed.

A forward that reads values, as a loop over the experts that got rows does, gets zeros, and every element is taken to
be nonzero. Such a pass shows one of the paths through the model. Attributes of modules and the state of random numbers
are restored; changes inside other objects of a module are not noticed.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode

VALUES_READ = "the forward read values of tensors on the meta device, which were made up"


def run_on_meta(model: nn.Module, shard: object, *, gradients: bool = False, **more: Any) -> Any:
    """Run the model's forward on two rows, on the meta device; an argument of `more` that is None is left out.

    With `gradients`, whatever depends on parameters requires a gradient, even if they are frozen.
    """
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False, "shard": shard, **more}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    settings: Any = _config  # torch.nonzero has no shape there unless all elements are taken to be nonzero
    values, tensors = _MadeUpValues(), _meta_tensors(model)
    if gradients:
        for name in tensors.keys() & dict(model.named_parameters(remove_duplicate=False)).keys():
            tensors[name].requires_grad_(tensors[name].is_floating_point())
    try:
        nonzero = settings.patch(meta_nonzero_assume_all_nonzero=True)
        with (
            preserve_attributes(model),
            torch.random.fork_rng(devices=[]),
            torch.set_grad_enabled(gradients),
            nonzero,
            values,
        ):
            # Tied parameters have a stand-in under each of their names, which torch refuses if it is to tie them.
            return functional_call(model, tensors, (), inputs, tie_weights=False)
    except Exception as error:
        if values.read:
            error.add_note(VALUES_READ)
        raise


def _meta_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return meta tensors by name, once for each module's own parameters and buffers.

    A module under two names, as a layer that others share, must be named once: torch would put the first stand-in back
    in place of the parameter.
    """
    return {
        f"{prefix}.{name}" if prefix else name: torch.empty_like(tensor, device="meta")
        for prefix, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has: hooks, children, parameters
_CONTAINERS = (list, dict, set, deque)


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Restore attributes of modules, buffers among them, and the contents of their lists and dicts."""
    attributes = [(vars(module), dict(vars(module)), _list_contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for current, saved, contents in attributes:
            current.clear()
            current.update(saved)
            for container, content in contents:
                _refill_container(container, content)


def _list_contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return each container among a module's attributes, and a copy of what is in it now."""
    values = [value for name, value in vars(module).items() if name not in _OF_MODULES or name == "_buffers"]
    return [(value, copy.copy(value)) for value in values if type(value) in _CONTAINERS]


def _refill_container(container: Any, content: Any) -> None:
    """Put saved contents back into the container itself, as other objects may refer to it."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


_READS: dict[Any, Callable[..., Any]] = {
    Tensor.item: lambda x: 0.0 if x.is_floating_point() else 0,
    Tensor.tolist: lambda x: torch.zeros(x.shape, dtype=x.dtype).tolist(),
    Tensor.__int__: lambda x: 0,
    Tensor.__index__: lambda x: 0,
    Tensor.__float__: lambda x: 0.0,
    **dict.fromkeys((Tensor.__bool__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero), lambda *_: False),
    **dict.fromkeys((Tensor.equal, torch.equal, Tensor.allclose, torch.allclose), lambda *_, **__: False),
}


class _MadeUpValues(TorchFunctionMode):
    """Answers reads of values on the meta device with zeros; `read` becomes True at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.read = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; one that reads values of a tensor without memory gets made-up ones.

        A scalar tensor as an index counts as 0, as torch would read its value.
        """
        if func in _READS and args[0].is_meta:
            self.read = True
            return _READS[func](*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(0 if _is_scalar(i) else i for i in index))
        return func(*args, **(kwargs or {}))


def _is_scalar(index: object) -> bool:
    """Return whether an index is a meta tensor of one number; a boolean is a mask and stays."""
    return isinstance(index, Tensor) and index.is_meta and index.ndim == 0 and index.dtype != torch.bool

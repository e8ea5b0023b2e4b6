"""Whole modules that are trained beside an adapter, as peft's `modules_to_save` names them: a tower, a projector."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from longspan.errors import ModelError


def trained_modules(model: nn.Module, trained: Collection[str], inside: str = "") -> tuple[str, ...]:
    """The largest modules of which all parameters are among the `trained`, by name; peft takes no lists of modules.

    They are modules `inside` one of that name, which itself is none.

    >>> trained_modules(model, {"model.visual.merger.ln_q.weight"})  # doctest: +SKIP
    ('model.visual.merger.ln_q',)

    Raises ModelError for a parameter that is trained in a module of which others are not.
    """
    modules = tuple(_largest(model.get_submodule(inside), f"{inside}." if inside else "", set(trained)))
    if apart := sorted(name for name in trained if not name.startswith(tuple(f"{module}." for module in modules))):
        raise ModelError(
            f"{', '.join(apart[:3])}: peft saves whole modules beside an adapter, and not all of this one is trained; "
            "train all of it or nothing, or keep it by save_checkpoint(folder, model, …)"
        )
    return modules


def _largest(module: nn.Module, prefix: str, trained: set[str]) -> Iterator[str]:
    for name, child in module.named_children():
        path, parameters = f"{prefix}{name}", dict(child.named_parameters())
        whole = bool(parameters) and all(f"{path}.{p}" in trained for p in parameters)
        if whole and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield path
        else:
            yield from _largest(child, f"{path}.", trained)


def entries_of(modules: Collection[str], entries: Any) -> dict[str, Any]:
    """Of values by names of weights those in some modules: buffers that are stored too."""
    inside = tuple(f"{module}." for module in modules)
    return {name: value for name, value in entries.items() if name.startswith(inside)} if inside else {}

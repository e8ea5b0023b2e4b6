"""Classes of optimizers by name, and the arguments that they take."""

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch.optim import SGD, AdamW, Optimizer

from longspan.errors import ConfigError
from longspan.train.optim.muon import Muon

OPTIMIZERS: Mapping[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon, "sgd": SGD}
# Arguments that have a key of their own, and are refused in optimizer.arguments.
KEYS_OF_ARGUMENTS = {"lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay"}
_REFUSED = {
    "LBFGS": "it evaluates the loss several times in a step, which a run does once",
    "SparseAdam": "it updates sparse gradients, and those of a run are dense",
    "Muon": "it takes nothing but whole matrices",
}
_INSTEAD = {"Muon": "muon, which is Muon over shards for matrices of layers, and AdamW for the rest"}


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of "adamw", "muon", "sgd" or a dotted name.

    Raises ConfigError for a name that is no optimizer's class, or of a class that cannot train here.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ConfigError(
            f"optimizer.class is {name!r}; use {', '.join(OPTIMIZERS)}, or the dotted name of a class, such as "
            "torch.optim.NAdam"
        )
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the name, or the module when it is imported, raises
        raise ConfigError(
            f"optimizer.class {name!r} cannot be imported: {type(error).__name__}: {error}; install its package, or "
            "correct the name"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"optimizer.class {name!r} is {kind!r}, no class of torch.optim.Optimizer")
    reason = _REFUSED.get(kind.__name__, "")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if not reason and not accepts_argument(kind, "lr"):
        reason = "it takes no lr, which the schedule sets at every step"
    elif not reason and closure is not None and closure.default is inspect.Parameter.empty:
        reason = "its step needs a closure that evaluates the loss again"
    if reason:
        raise ConfigError(
            f"optimizer.class {name!r} cannot train here: {reason}; use {_INSTEAD.get(kind.__name__, 'adamw')}"
        )
    return kind


def check_optimizer_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that the optimizer's class does not take, and for a wrong value of a switch.

    A switch is an argument whose default or annotation is bool; it takes true, false or null. Values of other arguments
    are left to the class. `name` is that of the class in [optimizer].
    """
    kind = optimizer_class(name)
    parameters = inspect.signature(kind).parameters
    if unknown := [key for key in arguments if key == "params" or not accepts_argument(kind, key)]:
        names = [key for key in parameters if key not in ("params", *KEYS_OF_ARGUMENTS)]
        raise ConfigError(f"optimizer.class {name!r} has no argument {unknown[0]!r}; known: {', '.join(names)}")
    for key, value in arguments.items():
        if key not in parameters or isinstance(value, bool | None):
            continue
        # An annotation of a switch, in whatever form, has no other type's name than bool.
        words = {*re.findall(r"\w+", str(parameters[key].annotation))}
        types = words - {"class", "typing", "Optional", "Union", "None"}
        if isinstance(parameters[key].default, bool) or types == {"bool"}:
            raise ConfigError(f"optimizer.class {name!r} is given {key}={value!r}, which is true or false")


def accepts_argument(kind: type[Optimizer], argument: str) -> bool:
    """Return whether an optimizer's class takes an argument of this name, or any."""
    parameters = inspect.signature(kind).parameters
    return argument in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

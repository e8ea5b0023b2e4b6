"""What refusals of several files share: words of messages, forwards that were replaced, parameters of two layers.

A forward set on one module (`model.forward = …`, or what accelerate's hooks put there) runs like any other when the
module is called. Where longspan makes a forward out of the class's code, or puts another in its place, it would be
dropped: such a module is refused by name, or left as it is. So is one whose class's forward has a wrapper that is not
transformers' own, if the code inside is taken out.

`guard_model` refuses what a prepared model's own class would do to weights that lie on several ranks. Rules for a
model's configuration and modules are in `exactness/declared_rules.py`.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError

DOCTOR = "; longspan doctor --model"
SAVES = "longspan.save_model(model, folder, world)"  # on all ranks; a Trainer has its own


def doctor_hint(model: Any) -> str:
    """Return the end of a message: the command that tries a small copy of this model, by its folder, family or class.

    >>> doctor_hint(Qwen3ForCausalLM(config))
    '; longspan doctor --model qwen3 tries a small copy of it and says which kernels it takes'

    "" for a class of one's own with a configuration of transformers, which names a model of transformers.
    """
    config = getattr(model, "config", None)
    kind = next(kind for kind in type(model).__mro__ if kind.__name__ == stock_class_name(model))
    if kind.__module__.startswith(("transformers.", "longspan.")):
        folder = str(getattr(config, "_name_or_path", "") or "")
        name = folder if folder and Path(folder).is_dir() else getattr(config, "model_type", "") or kind.__name__
    elif type(config).__module__.startswith("transformers."):
        return ""
    else:  # a script's own module is imported by the name of its file
        file = getattr(sys.modules[kind.__module__], "__file__", None) or "MODULE.py"
        name = f"{Path(file).stem if 'main__' in kind.__module__ else kind.__module__}.{kind.__qualname__}"
    return f"{DOCTOR} {name} tries a small copy of it and says which kernels it takes"


def items_text(items: Sequence[int] | Sequence[str], limit: int = 4) -> str:
    """Write the first items in words, and how many there are in all."""
    head = ", ".join(str(item) for item in items[:limit])
    return f"{head}, … ({len(items)} in all)" if len(items) > limit else head


def stock_class_name(model: nn.Module) -> str:
    """Return the name of a model's class without the "FSDP" that FSDP2 puts before it."""
    return type(model).__name__.removeprefix("FSDP")


def has_instance_forward(module: nn.Module) -> bool:
    """Return whether somebody else than longspan gave a module a forward in place of its class's.

    Two kinds are longspan's: functions that its own modules define, alone or in a `partial`, and copies of the class's
    code that call other functions (`seams/mixers.py`).
    """
    forward, in_class = vars(module).get("forward"), type(module).forward
    function = forward.func if isinstance(forward, partial) else getattr(forward, "__func__", forward)
    if function is None or function is in_class or _defining_module(function).startswith("longspan."):
        return False
    return getattr(function, "__code__", None) is not getattr(inspect.unwrap(in_class), "__code__", None)


def is_wrapped_by_others(module: nn.Module) -> bool:
    """Return whether the forward of a module's class has a wrapper that is not transformers' own."""
    function: Any = type(module).forward
    while hasattr(function, "__wrapped__"):
        if not _defining_module(function).startswith("transformers."):
            return True
        function = function.__wrapped__
    return False


def find_set_forwards(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Return the modules, by name and class, to which somebody gave a forward in place of their class's."""
    return [f"{name} ({type(module).__name__})" for name, module in modules if has_instance_forward(module)]


def _defining_module(function: Any) -> str:
    """By its globals: `functools.wraps` copies `__module__` from the wrapped function, but not these."""
    return function.__globals__["__name__"] if isinstance(function, FunctionType) else ""


def refuse_shared_layers(
    model: PreTrainedModel, layers: Iterable[str], blocks: Sequence[Sequence[nn.Module]] = ()
) -> None:
    """Raise ModelError if one of these decoder layers shares parameters with another, or with what is around it.

    FSDP2 shards each layer, and sequence parallelism sums its gradients, as if its parameters were in no other.
    `blocks` are sets of modules with the same parameters, which layers may share, but not what is around the layers.
    """
    shared_in_blocks = {id(parameter) for modules in blocks for parameter in modules[0].parameters()}
    owner: dict[int, tuple[str, str]] = {}  # of a parameter: its first name, and its layer, "" around the layers
    prefixes = [f"{layer}." for layer in layers]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        first, owner_layer = owner.setdefault(id(parameter), (name, layer))
        # parameters of a block may be in two layers, but not in a layer and around the layers
        may_share = "" not in (layer, owner_layer) and id(parameter) in shared_in_blocks
        if owner_layer != layer and not may_share:
            raise ModelError(
                f"{type(model).__name__}: {name} is {first}, and layers that share parameters are not sharded or split "
                "over rows; use shard_parameters=False and sequence_parallel=False, or give each layer its own"
            )


def guard_model(prepared: nn.Module, name: str, saves: str = SAVES) -> None:
    """Have a prepared model of this architecture, and its base model, refuse to be saved, wrapped or generated from.

    `saves` is the call that saves it.
    """
    modules = [module for module in prepared.modules() if isinstance(module, PreTrainedModel)]
    for module in (prepared, *modules):
        target: Any = module
        for method in ("save_pretrained", "push_to_hub"):
            setattr(target, method, partial(_refuse_saving, name, method, saves))
        if hasattr(target, "generate"):
            target.generate = partial(_refuse_generating, name, saves)
        target._ddp_params_and_buffers_to_ignore = _RefusesDDP(name)  # DistributedDataParallel fails as it reads this


def _refuse_saving(name: str, method: str, saves: str, *args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        f"{name}.{method} would write what this rank holds of a prepared model; call {saves} on all ranks, which "
        "writes a folder that transformers loads"
    )


def _refuse_generating(name: str, saves: str, *args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        f"{name}.generate would need caches, which a prepared model has none of; {saves} on all ranks writes a folder "
        "that transformers loads and generates from"
    )


class _RefusesDDP:
    """DistributedDataParallel reads this list of names first of all (torch 2.11 to 2.15)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[str]:
        raise ModelError(
            f"{self._name} was prepared: its gradients are summed over the slots by run_step; do not wrap it in "
            "DistributedDataParallel, nor give it to accelerator.prepare or a Trainer, which do that; "
            "longspan.hf.with_longspan(Trainer) takes the model before prepare, and what takes their place in a loop "
            'is in docs/own-loop.md, "From a Trainer script"'
        )

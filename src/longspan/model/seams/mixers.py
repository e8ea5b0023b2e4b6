"""State-space layers of transformers ("mixers"), recognised by what their forward calls.

Gated delta nets, Kimi's delta attention, Mamba 2 and short convolutions, of whatever family. A module with a
convolution whose forward calls anything else is not recognised, and is refused by name. How a mixer runs over a sharded
sequence is in `mixer_calls.py`.
"""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from longspan.comm.shard import outside_graphs

ROWWISE_LAYER_TYPES = ("mlp", "moe")  # types of layers in which rows do not meet, as Nemotron-H names them
_SCANS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
_CONVOLUTION = "causal_conv1d_fn"
_KNOWN = frozenset({
    _CONVOLUTION,
    *_SCANS,
    "mamba2_split_conv1d_scan_combined",
    "apply_mask_to_padding_states",  # there is no mask
    "causal_conv1d_update",  # and what follows: steps of generation, with a cache
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
})  # fmt: skip


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the mixers of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_mixer(module)}


def is_mixer(module: nn.Module) -> bool:
    """Return whether the forward of a module's class is a mixer's: a causal convolution, and a scan or none.

    A forward that calls an unknown function is not taken for a mixer's, as it may mix rows in another way.
    """
    convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    if not convolutions:
        return False
    called = _called_functions(class_forward(module))
    return _CONVOLUTION in called and called <= _KNOWN


def replace_functions(mixer: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Give an instance its class's forward, in which these names stand for these functions."""
    forward = class_forward(mixer)
    names = {
        **forward.__globals__,
        **{name: function for name, function in functions.items() if name in forward.__code__.co_names},
    }
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    mixer.forward = MethodType(copy, mixer)


def run_outside_graphs(module: nn.Module) -> None:
    """Have torch.compile end its graph before a call of this module and begin another one after it."""
    vars(module)["forward_outside_graphs"] = module.forward
    module.forward = MethodType(_forward_outside_graphs, module)


@outside_graphs
def _forward_outside_graphs(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.forward_outside_graphs(*args, **kwargs)


def use_torch_operations(model: nn.Module) -> None:
    """Let mixers call transformers' own operations, which run everywhere, whatever kernels are installed.

    transformers wraps each operation to choose an installed kernel; the torch operation is inside the wrapper.
    """
    for mixer in find_mixers(model).values():
        called = {name: class_forward(mixer).__globals__[name] for name in _called_functions(class_forward(mixer))}
        replace_functions(mixer, {name: inspect.unwrap(function) for name, function in called.items()})


def class_forward(module: nn.Module) -> FunctionType:
    """Return the forward that its class defines, unwrapped; `prepare` refuses wrappers that are not transformers'."""
    return inspect.unwrap(type(module).forward)


def _called_functions(forward: Any) -> set[str]:
    if not isinstance(forward, FunctionType):
        return set()
    globals_by_name = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {name for name, value in globals_by_name.items() if callable(value) and not isinstance(value, type)}

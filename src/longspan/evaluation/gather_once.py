"""Parameters that FSDP2 gathers once for many forward passes without backward passes, as those of an evaluation.

While parameters are whole, FSDP2's hooks of a layer would do nothing and take the host as long as a quarter of the
layer. So two things change here for that time and change back at its end: when parameters are freed, and which hooks
run.
A pipeline and free plans keep parameters whole by themselves (`model/sharding.py`).
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longspan.model.float8.weights import find_float8_weight, quantise_once
from longspan.model.sharding import free_groups, fsdp_modules, reduction_groups, reshards_after_forward

_GATHERED_BYTES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


@contextmanager
def gather_once(model: nn.Module) -> Iterator[None]:
    """Gather parameters once for forward passes inside, without backward passes; all ranks enter it together.

    A layer is gathered when it is first called, while the device computes the layer before, and freed at the end, also
    after an error. Copies of weights in float8 stay as long.
    """
    modules = fsdp_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        with quantise_once(model), ExitStack() as hooks:
            # Not those of the model itself, with which FSDP2 begins and ends a pass.
            for state in dict.fromkeys(module._get_fsdp_state() for module in modules if module is not model):
                hooks.enter_context(_run_hooks_until_gathered(state))
            yield
    finally:
        for module in modules:
            # Never None: where it is not known, `gathered_bytes` is 0, and the caller does not gather once.
            module.set_reshard_after_forward(bool(reshards_after_forward(module)), recurse=False)
        free_groups(modules)


@contextmanager
def _run_hooks_until_gathered(state: Any) -> Iterator[None]:
    """While open, run a layer's FSDP2 hooks only until its parameters are gathered, or where they cast.

    Other hooks keep their order, as ours take the places of FSDP2's. A block of several modules, which are gathered
    together, keeps its hooks: FSDP2 registers these under one handle, which names none of them.
    """
    if len(state._modules) != 1:
        yield
        return
    (module,) = state._modules
    before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
    hooks = _GatheredHooks(state, module._forward_pre_hooks[before], module._forward_hooks[after])
    module._forward_pre_hooks[before], module._forward_hooks[after] = (
        hooks.begin_forward,
        hooks.end_forward,
    )
    try:
        yield
    finally:
        module._forward_pre_hooks[before], module._forward_hooks[after] = hooks.pre_forward, hooks.post_forward


class _GatheredHooks:
    """The hooks of one layer: FSDP2's own, `pre_forward` and `post_forward`, and what stands for them."""

    def __init__(self, state: Any, pre_forward: Any, post_forward: Any) -> None:
        """Take a layer's FSDP2 state and hooks; `_runs_fsdp_hooks`: the forward pass under way runs FSDP2's hooks."""
        self.pre_forward, self.post_forward = pre_forward, post_forward
        self._runs_fsdp_hooks = False
        self._groups = [*reduction_groups([state._modules[0]])]
        policy = state._mp_policy
        self._input_dtype: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self._casts_outputs: bool = policy.output_dtype is not None

    def begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run FSDP2's hook where a parameter is not gathered yet, or inputs or outputs are cast, which its hooks do.

        Returning None leaves the inputs as they are.
        """
        casts = self._casts_outputs or not (
            self._input_dtype is None or all(_has_dtype(x, self._input_dtype) for x in (*args, *kwargs.values()))
        )
        self._runs_fsdp_hooks = casts or not all(group.is_unsharded for group in self._groups)
        return self.pre_forward(module, args, kwargs) if self._runs_fsdp_hooks else None

    def end_forward(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Run FSDP2's hook behind a forward pass if `begin_forward` ran the one before it; None leaves the output."""
        return self.post_forward(module, args, out) if self._runs_fsdp_hooks else None


def _has_dtype(x: object, dtype: torch.dtype) -> bool:
    """Return whether FSDP2 would surely leave an argument as it is, as no tensor in it has to be cast to this dtype.

    Only lists and tuples are looked through. Mappings, sets and dataclasses, in which FSDP2 casts tensors too, give
    False.
    """
    if isinstance(x, Tensor):
        return x.dtype == dtype or not x.is_floating_point()
    if isinstance(x, tuple | list):
        return all(_has_dtype(value, dtype) for value in x)
    return not isinstance(x, Mapping | set) and not hasattr(x, "__dataclass_fields__")


def gathered_bytes(model: nn.Module) -> int:
    """Count the bytes on this rank of all parameters that `gather_once` holds, in the dtype that FSDP2 computes in.

    0 if there are none, and where it is not known whether a module frees its parameters after a pass, as of a model
    that others sharded.
    """
    if model not in _GATHERED_BYTES:
        modules = fsdp_modules(model)
        known = all(reshards_after_forward(module) is not None for module in modules)
        _GATHERED_BYTES[model] = sum(
            data.numel() * group.mesh_info.shard_mesh_size * _bytes_per_element(group, parameter)
            for group in (reduction_groups(modules) if known else ())
            for parameter in group.fsdp_params
            for data in (parameter._sharded_param_data,)
        )
    return _GATHERED_BYTES[model]


def _bytes_per_element(group: Any, parameter: Any) -> int:
    """Return the bytes that passes hold for each element of a parameter: gathered, and one more for a float8 copy."""
    owner = parameter._module_info
    policy = getattr(parameter, "mp_policy", None) or group.mp_policy  # torch 2.15 has one for each parameter
    dtype = policy.param_dtype or parameter._sharded_param_data.dtype  # in which it is gathered
    has_copy = find_float8_weight(owner.module, owner.param_name) is not None
    return dtype.itemsize + has_copy

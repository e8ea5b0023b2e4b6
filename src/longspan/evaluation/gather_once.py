"""Parameters gathered once for all forward passes of an evaluation, and the bytes that this takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from longspan.model.marks import find_float8_weight, find_packed_weight, has_weights_on_host, keep_float8_weights
from longspan.model.sharding import (
    fsdp_modules,
    leave_out_idle_hooks,
    reduction_groups,
    reshard,
    reshards_after_forward,
)


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
        with keep_float8_weights(model), leave_out_idle_hooks(model):
            yield
    finally:
        for module in modules:
            # Never None: where it is not known, `gathered_bytes` is 0, and the caller does not gather once.
            module.set_reshard_after_forward(bool(reshards_after_forward(module)), recurse=False)
        reshard(model)


def gathered_bytes(model: nn.Module) -> int:
    """Count the bytes on this rank of all parameters that `gather_once` holds; 0 where others sharded the model, or
    where weights wait on the host."""
    modules = fsdp_modules(model)
    if has_weights_on_host(model) or any(reshards_after_forward(module) is None for module in modules):
        return 0
    sizes = (
        parameter._sharded_param_data.numel()
        * group.mesh_info.shard_mesh_size
        * _bytes_per_element(group, parameter)
        for group in reduction_groups(modules)
        for parameter in group.fsdp_params
    )
    return int(sum(sizes))


def _bytes_per_element(group: Any, parameter: Any) -> float:
    """Bytes that passes hold for each element: gathered, and one more for a float8 copy."""
    owner = parameter._module_info
    policy = getattr(parameter, "mp_policy", None) or group.mp_policy  # torch 2.15 has one for each parameter
    dtype = policy.param_dtype or parameter._sharded_param_data.dtype  # in which it is gathered
    has_copy = find_float8_weight(owner.module, owner.param_name) is not None
    if (packed := find_packed_weight(owner.module, owner.param_name)) is not None:
        return packed.columns / packed.row_bytes * (packed.dtype.itemsize + has_copy)
    return dtype.itemsize + has_copy

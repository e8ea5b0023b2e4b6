"""Linears with a LoRA adapter, y = W x + s B (A x), under a tensor-parallel style, and adapters that are refused there.

Column-wise, ranks hold rows of W and of B, and A whole: each applies A to the whole input, for its part of the
outputs, so that A's gradient is partial and summed. Row-wise, ranks hold columns of W and of A, and B whole: B is
linear, so that the ranks' outputs, adapter included, are summed once, and B's gradient, of a part of A x, is partial
and summed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.adapters import adapter_in, is_adapted, is_copied, peft_modules
from longspan.model.tensor_parallel.family_plans import COLWISE, ROWWISE
from longspan.model.tensor_parallel.plan import Placed
from longspan.model.tensor_parallel.styles import (
    columnwise,
    partial_gradients,
    slice_inputs,
    sum_of_outputs,
    wrap_forward,
)


def split_adapted(module: nn.Module, style: str, world: World, *, sequence_parallel: bool) -> None:
    """Split an adapted linear and its adapter; the caller's input gradient is partial under column-wise style."""
    layer: Any = module
    base, first, second = layer.base_layer, layer.lora_A.values(), layer.lora_B.values()
    if style == COLWISE:
        for linear in first:
            partial_gradients(linear, world.key)
        for linear in (base, *second):
            columnwise(linear, world)
        return
    for linear in (base, *first):
        slice_inputs(linear, world)
    for linear in second:
        partial_gradients(linear, world.key)
    wrap_forward(layer, leave=sum_of_outputs(base, world.key, sequence_parallel=sequence_parallel))


def refuse_adapter(model: PreTrainedModel, placed: Sequence[Placed]) -> None:
    """Raise ModelError, with every reason, for an adapter that would not be exact under tensor parallelism."""
    if reasons := [*_reasons(model, placed)]:
        raise ModelError(f"the adapter of {type(model).__name__} cannot be split: {'; '.join(reasons)}; use tp 1")


def _reasons(model: PreTrainedModel, placed: Sequence[Placed]) -> Iterator[str]:
    adapter = adapter_in(model)
    if adapter is None:
        return
    if adapter.dropout:
        yield f"lora_dropout is {adapter.dropout:g}, and tensor-parallel ranks would drop different inputs"
    for key in ("use_dora", "lora_bias"):
        if getattr(adapter.config, key, False):
            yield f"{key} is set, which is not shown to be exact there"
    modules = peft_modules(model)
    if copied := [name for name, module in modules.items() if is_copied(module)]:
        yield f"modules_to_save ({', '.join(copied[:2])}) are not split"
    styles = {entry.name: entry.style for entry in placed}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    beside = [
        name
        for name, module in modules.items()
        if is_adapted(module) and module not in ends and styles.get(name) not in (COLWISE, ROWWISE)
    ]
    if beside:
        yield f"{beside[0]} is neither column-wise nor row-wise in the model's tensor-parallel plan"

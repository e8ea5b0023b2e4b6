"""Linears with a LoRA adapter, y = W x + s B (A x), under a tensor-parallel style, and adapters that are refused there.

Column-wise, ranks hold rows of W and of B, and A whole: each applies A to the whole input, for its part of the
outputs, so that A's gradient is partial and summed. Row-wise, ranks hold columns of W and of A, and B whole: B is
linear, so that the ranks' outputs, adapter included, are summed once. A rank's B sees a part of A x, so that B's
gradient is partial and summed too. Inside a mixer an adapter is split with its projection (`mixers.py`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.tp_collectives import tp_split
from longspan.errors import ModelError
from longspan.model.adapters import find_adapter, is_adapted, is_copied, peft_modules
from longspan.model.tensor_parallel.plan import (
    COLWISE,
    GATHERED,
    MIXER,
    PACKED,
    PARTIAL_GRADIENT,
    QKV,
    ROWWISE,
    SPLIT_INPUT,
    StyledModule,
    split_block_names,
)
from longspan.model.tensor_parallel.styles import (
    gather_outputs,
    make_output_sum,
    slice_inputs,
    split_columns,
    split_packed_columns,
    split_three_columns,
    sum_partial_gradients,
    wrap_forward,
)

ADAPTED = (COLWISE, ROWWISE, PACKED, PARTIAL_GRADIENT, SPLIT_INPUT, *GATHERED)  # styles of linears with adapters


def split_adapted_linear(module: nn.Module, style: str, world: World, *, sequence_parallel: bool) -> None:
    """Split a linear with an adapter, and the adapter with it, by the style of the linear.

    An adapter is two linears: `first` from the inputs to the adapter's rank, `second` from there to the outputs.
    Row-wise styles split inputs, so the linear and `first`; column-wise ones split outputs, so the linear and `second`.
    The linear of the adapter that stays whole has a partial gradient on each rank, which is summed over tp. With
    PARTIAL_GRADIENT all three linears stay whole, and their gradients are summed. With SPLIT_INPUT every rank has the
    whole inputs and takes its part of them; with styles in GATHERED every rank gets all outputs.
    """
    layer: Any = module
    key, base, first, second = world.key, layer.base_layer, layer.lora_A.values(), layer.lora_B.values()
    if style in (ROWWISE, SPLIT_INPUT):
        for linear in (base, *first):
            slice_inputs(linear, world)
        for linear in second:
            sum_partial_gradients(linear, key)
        whole_inputs = style == SPLIT_INPUT  # in a block that gets, and returns, all rows
        leave = make_output_sum(base, key, sequence_parallel=sequence_parallel and not whole_inputs)
        wrap_forward(layer, enter=partial(tp_split, world_key=key, dim=-1) if whole_inputs else None, leave=leave)
        return
    for linear in (base, *first, *second) if style == PARTIAL_GRADIENT else first:
        sum_partial_gradients(linear, key)
    if style == PARTIAL_GRADIENT:
        return
    for linear in (base, *second):
        if style == PACKED:
            split_packed_columns(linear, world)
        elif style == QKV:
            split_three_columns(linear, world)
        else:
            split_columns(linear, world)
    if style in GATHERED:
        gather_outputs(layer, key)


def refuse_adapter(model: PreTrainedModel, styled_modules: Sequence[StyledModule]) -> None:
    """Raise ModelError, with every reason, for an adapter that would not be exact under tensor parallelism."""
    if reasons := [*_adapter_reasons(model, styled_modules)]:
        raise ModelError(f"the adapter of {type(model).__name__} cannot be split: {'; '.join(reasons)}; use tp 1")


def _adapter_reasons(model: PreTrainedModel, styled_modules: Sequence[StyledModule]) -> Iterator[str]:
    """An adapter is split as its linear is, so that each adapted linear needs a style; adapters of the embedding and of
    the head stay whole.
    """
    adapter = find_adapter(model)
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
    styles = {entry.name: entry.style for entry in styled_modules}
    embedding_and_head = (model.get_input_embeddings(), model.get_output_embeddings())
    blocks = split_block_names(styled_modules)
    linears = [name for name, module in modules.items() if is_adapted(module) and module not in embedding_and_head]
    # A linear with a style is split by it. Without one, it is split by a mixer around it, or stays whole outside of
    # split blocks; inside attention or an MLP that is split, its gradient would be partial.
    around = {name: [block for block in blocks if name.startswith(f"{block}.")] for name in linears}
    in_mixer = {name for name, outer in around.items() if all(styles.get(block) == MIXER for block in outer)}
    if unplaced := [n for n in linears if not (styles[n] in ADAPTED if n in styles else n in in_mixer)]:
        yield f"no tensor-parallel style of an adapter is known for {unplaced[0]} ({styles.get(unplaced[0], 'none')})"

"""Sequence parallelism: norms and residuals between split blocks hold 1 / tp of a slot's rows.

Rows are gathered before blocks that need all; behind them each rank has its rows of the output.
"""

from functools import partial

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.tp_collectives import tp_gather, tp_split
from longspan.errors import ModelError
from longspan.model.adapted_modules import is_adapted
from longspan.model.layers import Absent, decoder_model, layers_and_mtp_blocks, mtp_depths
from longspan.model.parts import ModelParts, parts_with_outputs, trace_parts, usual_part_names
from longspan.model.tensor_parallel.module_styles import StyledModule, modules_named_experts, split_block_names
from longspan.model.tensor_parallel.split_modules import ROWS, sum_partial_gradients, wrap_forward


def split_residuals(model: PreTrainedModel, styled_modules: list[StyledModule], world: World) -> None:
    """Let norms and residuals of a split model work on 1 / tp of a slot's rows, from the embedding to the last norm.

    Gradients of norms, and of linears outside split blocks, are summed over tp. The last norm gathers all rows of its
    output; depths of multi-token prediction split these again, and gather the rows of their own last norm.
    """
    key = world.key
    for depth in mtp_depths(model):
        for module in (depth.enorm, depth.hnorm, depth.eh_proj, depth.post_norm):
            sum_partial_gradients(module, key)
        # `enorm` gets rows of the embedding, which hands on only this rank's
        wrap_forward(depth.hnorm, enter=partial(tp_split, world_key=key, dim=ROWS))
        wrap_forward(depth.post_norm, leave=partial(tp_gather, world_key=key, dim=ROWS, gradient="identical"))
    for name, layer in layers_and_mtp_blocks(model).items():
        single_row_modules, blocks_of_all_rows = single_and_full_row_modules(name, layer, styled_modules)
        for module in single_row_modules:
            sum_partial_gradients(module, key)
        for block in blocks_of_all_rows:
            wrap_forward(
                block,
                enter=partial(tp_gather, world_key=key, dim=ROWS, gradient="identical"),
                leave=partial(tp_split, world_key=key, dim=-2),  # Llama 4's block returns (T, D)
            )
    norm = getattr(decoder_model(model), final_norm_name(model))
    if not isinstance(norm, Absent):  # a pipeline stage other than the last has no norm
        sum_partial_gradients(norm, key)
        wrap_forward(norm, leave=partial(tp_gather, world_key=key, dim=ROWS, gradient="identical"))


def single_and_full_row_modules(
    name: str, layer: nn.Module, styled_modules: list[StyledModule]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the children of a decoder layer that work on single rows, and those that must be given all rows.

    Norms, and linears of whole features, work on single rows; blocks of experts, and attention that is not split, need
    all. Split blocks, which gather rows themselves, are in neither list. A child around split blocks is looked at like
    the layer. `name` is the layer's in the model. ModelError for any other child.
    """
    single_row_modules, full_row_modules = list[nn.Module](), list[nn.Module]()
    blocks = split_block_names(styled_modules)
    for child, module in layer.named_children():
        child_name = f"{name}.{child}"
        if modules_named_experts(module) or (
            child_name not in blocks and type(module).__name__.endswith("Attention")
        ):
            full_row_modules.append(module)
        elif is_adapted(module) or not [*module.children()]:  # a norm, or a linear of whole features
            single_row_modules.append(module)
        elif any(block.startswith(f"{child_name}.") for block in blocks):  # a layer around layers, as in Zamba 2
            inner_modules = single_and_full_row_modules(child_name, module, styled_modules)
            single_row_modules += inner_modules[0]
            full_row_modules += inner_modules[1]
        elif child_name not in blocks:
            raise ModelError(
                f"{child_name} ({type(module).__name__}) has no place in a sequence-parallel region: it is neither "
                "in the tensor-parallel plan nor a norm nor a block of experts; use sequence_parallel=False"
            )
    return single_row_modules, full_row_modules


def final_norm_name(model: PreTrainedModel) -> str:
    """Return the name of the norm after the layers in the base model; ModelError without it, embedding or layers."""
    names = usual_part_names(model)
    if len(names) != 3:
        raise ModelError(
            f"{type(decoder_model(model)).__name__} has {', '.join(names)}, and no embedding, list of layers and norm "
            "after them, where sequence-parallel rows are split and gathered; use sequence_parallel=False"
        )
    return names[-1]


def refuse_sequence_parallel(model: PreTrainedModel) -> None:
    """Raise ModelError unless a model is embedding, layers and norm, and calls the norm once, last."""
    base = decoder_model(model)
    name = type(model).__name__
    norm = final_norm_name(model)
    embedding, layers = usual_part_names(model)[:2]
    parts = parts_with_outputs(model, ModelParts((embedding,), layers, (norm,)))
    if unplaced := [n for n, _ in base.named_parameters() if n.partition(".")[0] not in (embedding, layers, norm)]:
        raise ModelError(
            f"{name} has parameters outside its embedding, layers and norm ({', '.join(unplaced[:4])}), which have no "
            "place in a sequence-parallel region; use sequence_parallel=False"
        )
    order = [call.part for call in trace_parts(model, parts)[0]]
    if order.count(norm) != 1 or order[-1] != norm:
        raise ModelError(
            f"{name} calls {norm} {order.count(norm)} times in a forward pass, as {', '.join(order)}; sequence "
            "parallelism gathers rows in it, once, after the layers: use sequence_parallel=False"
        )

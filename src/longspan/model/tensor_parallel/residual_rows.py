"""Sequence parallelism: from the embedding to the last norm, norms and residuals work on 1 / tp of a slot's tokens.

A row is the hidden state of one token. Here is decided which modules of a decoder layer work on single rows and which
get all rows; models are refused whose rows cannot be split at the embedding and gathered, once, after the last norm.
"""

from functools import partial

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.moves.tp_collectives import tp_gather, tp_split
from longspan.errors import ModelError
from longspan.model.adapters import is_adapted
from longspan.model.layers import Absent, decoder_layers, decoder_model
from longspan.model.mtp.depths import model_depths, mtp_blocks
from longspan.model.parts import ModelParts, parts_with_outputs, trace_parts, usual_parts
from longspan.model.tensor_parallel.plan import StyledModule, layer_experts, split_block_names
from longspan.model.tensor_parallel.styles import ROWS, sum_partial_gradients, wrap_forward


def split_residuals(model: PreTrainedModel, styled_modules: list[StyledModule], world: World) -> None:
    """Let norms and residuals work on 1 / tp of a slot's rows, from the embedding to the last norm.

    The gradients of norms are summed over the tensor-parallel ranks. Blocks that need all rows gather them and keep
    their part of the output. The last norm gathers all rows of its output, and the layers that predict further tokens
    (`model_depths`) take their part of these and gather again.
    """
    key = world.key
    for depth in model_depths(model):
        for module in (depth.enorm, depth.hnorm, depth.eh_proj, depth.post_norm):
            _sum_row_gradients(module, key)
        # `enorm` gets rows of the embedding, which hands on only this rank's
        wrap_forward(depth.hnorm, enter=partial(tp_split, world_key=key, dim=ROWS))
        wrap_forward(depth.post_norm, leave=partial(tp_gather, world_key=key, dim=ROWS, gradient="identical"))
    for name, layer in layers_and_depths(model).items():
        norms, blocks_of_all_rows = residual_regions(name, layer, styled_modules)
        for norm in norms:
            _sum_row_gradients(norm, key)
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


def _sum_row_gradients(module: nn.Module, key: int) -> None:
    """Sum over tp the parameter gradients of a module that works on some of the rows, its adapter's included."""
    for inner in module.modules():
        sum_partial_gradients(inner, key)


def layers_and_depths(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder layers of this pipeline stage, and layers of multi-token prediction, by name."""
    return decoder_layers(model) | mtp_blocks(model)


def residual_regions(
    name: str, layer: nn.Module, styled_modules: list[StyledModule]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return (children of a decoder layer that work on single rows, children that must be given all rows).

    All rows are for blocks of experts, and for attention that the plan does not split, so that every rank computes all
    heads. Blocks whose heads or features are split are in neither list: they gather rows themselves.
    """
    single_row_modules, full_row_modules, blocks = (
        list[nn.Module](),
        list[nn.Module](),
        split_block_names(styled_modules),
    )
    for child, module in layer.named_children():
        child_name = f"{name}.{child}"
        if layer_experts(module) or (child_name not in blocks and type(module).__name__.endswith("Attention")):
            full_row_modules.append(module)
        elif is_adapted(module) or not any(True for _ in module.children()):  # a norm, or a linear of whole features
            single_row_modules.append(module)
        elif any(block.startswith(f"{child_name}.") for block in blocks):  # a layer around layers, as in Zamba 2
            inside = residual_regions(child_name, module, styled_modules)
            single_row_modules += inside[0]
            full_row_modules += inside[1]
        elif child_name not in blocks:
            raise ModelError(
                f"{child_name} ({type(module).__name__}) has no place in a sequence-parallel region: it is neither "
                "in the tensor-parallel plan nor a norm nor a block of experts; use sequence_parallel=False"
            )
    return single_row_modules, full_row_modules


def final_norm_name(model: PreTrainedModel) -> str:
    """Return the name of the norm after the layers in the base model.

    Raises ModelError if the base model lacks it, or the embedding or the list of layers before it.
    """
    names = usual_parts(model)
    if len(names) != 3:
        raise ModelError(
            f"{type(decoder_model(model)).__name__} has {', '.join(names)}, and no embedding, list of layers and norm "
            "after them, where sequence-parallel rows are split and gathered; use sequence_parallel=False"
        )
    return names[-1]


def refuse_model_without_region(model: PreTrainedModel) -> None:
    """Raise ModelError for a model without the region in which rows are split: from its embedding to its last layer.

    Rows are whole again after the norm. So a model must be embedding, layers and norm, and call the norm once, last.
    """
    base, name, norm = decoder_model(model), type(model).__name__, final_norm_name(model)
    embedding, layers = usual_parts(model)[:2]
    parts = parts_with_outputs(model, ModelParts((embedding,), layers, (norm,)))
    if others := [n for n, _ in base.named_parameters() if n.partition(".")[0] not in (embedding, layers, norm)]:
        raise ModelError(
            f"{name} has parameters outside its embedding, layers and norm ({', '.join(others[:4])}), which have no "
            "place in a sequence-parallel region; use sequence_parallel=False"
        )
    order = [call.part for call in trace_parts(model, parts)[0]]
    if order.count(norm) != 1 or order[-1] != norm:
        raise ModelError(
            f"{name} calls {norm} {order.count(norm)} times in a forward pass, as {', '.join(order)}; sequence "
            "parallelism gathers rows in it, once, after the layers: use sequence_parallel=False"
        )

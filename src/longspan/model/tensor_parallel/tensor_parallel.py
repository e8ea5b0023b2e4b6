"""Tensor parallelism from a model's plan: heads, widths and vocabulary split over the `tp` ranks of a slot.

All ranks of a slot hold the same rows and compute the same loss, which counts once a slot; each attends with its own
heads. Experts are not split: their rows are, see `split_expert_rows`. Logits are whole on every rank: the head
gathers them, from as many rows of hidden states as it is given, so that a caller who wants little memory gives few.

With sequence parallelism, norms and residuals hold 1 / tp of the slot's rows (hidden states of tokens): gathered
before attention and MLP, summed after them so that each rank gets its part; positions, attention, the last hidden
states and logits are of all the slot's rows. A slot is the tp ranks that hold the same tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.tp_collectives import tp_copy, tp_gather, tp_split
from longspan.errors import ModelError
from longspan.model.adapters import is_adapted
from longspan.model.layers import Absent, decoder_layers, decoder_model, expert_modules
from longspan.model.mtp.depths import model_depths, mtp_blocks
from longspan.model.parts import ModelParts, parts_with_outputs, trace_parts, usual_parts
from longspan.model.tensor_parallel import plan as tp_style
from longspan.model.tensor_parallel.mixers import check_mixer, split_mixer
from longspan.model.tensor_parallel.plan import (
    StyledModule,
    check_tp_sizes,
    layer_experts,
    list_partial_gradients,
    list_styles,
    split_block_names,
)
from longspan.model.tensor_parallel.split_adapters import ADAPTED, refuse_adapter, split_adapted_linear
from longspan.model.tensor_parallel.split_trial import refuse_mixed_features
from longspan.model.tensor_parallel.styles import (
    ROWS,
    Transform,
    slice_parameter,
    split_and_gather_columns,
    split_columns,
    split_expert_rows,
    split_packed_columns,
    split_rows,
    split_vocabulary,
    split_whole_inputs,
    sum_partial_gradients,
    wrap_forward,
)
from longspan.model.weights.local_tensors import local_tensor


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
    single_row_modules, full_row_modules = list[nn.Module](), list[nn.Module]()
    blocks = split_block_names(styled_modules)
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


def shared_places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """List, for each parameter that several modules share, (module, name of the parameter there) of each."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [places_of_one for places_of_one in places.values() if len(places_of_one) > 1]


def share_parameters_again(places: Sequence[Sequence[tuple[nn.Module, str]]]) -> None:
    """Give modules that shared a parameter the first module's slice, after each has made a slice for itself."""
    for (first_module, name), *other_places in places:
        for module, other_name in other_places:
            module.register_parameter(other_name, getattr(first_module, name))


def refuse_tensor_parallel(model: PreTrainedModel, world: World, *, sequence_parallel: bool) -> None:
    """Raise ModelError, before anything is changed, for a model that cannot be split over the world's tp."""
    tp = world.home.tp
    if tp > 1:
        _list_split_modules(model, tp, sequence_parallel=sequence_parallel)
        if sequence_parallel:
            refuse_model_without_region(model)
    elif sequence_parallel:
        raise ModelError("sequence_parallel splits rows over tensor-parallel ranks, the home has tp 1; leave it out")


def _list_split_modules(model: PreTrainedModel, tp: int, *, sequence_parallel: bool) -> list[StyledModule]:
    """List the modules and parameters to split, after checks of all of them."""
    styled_modules = list_styles(model)
    refuse_adapter(model, styled_modules)
    check_tp_sizes(model, styled_modules, tp)
    for name, module, style, _ in styled_modules:
        if style == tp_style.MIXER:
            check_mixer(name, module, tp)
    styled_modules += list_partial_gradients(model, styled_modules)
    refuse_mixed_features(model, styled_modules)
    if sequence_parallel:
        for name, layer in layers_and_depths(model).items():
            residual_regions(name, layer, styled_modules)  # here only to raise, as the next line
        final_norm_name(model)
    return styled_modules


def split_over_ranks(
    model: PreTrainedModel, world: World, *, sequence_parallel: bool = False, sum_expert_gradients: bool = False
) -> None:
    """Split the model over the tensor-parallel ranks of this rank's slot; all ranks call it together, before FSDP2.

    `sum_expert_gradients` is for parameters that nobody else shards over the ranks of `world.meshes.expert`.
    Raises ModelError for a model whose plan or sizes do not allow it.
    """
    styled_modules = _list_split_modules(model, world.home.tp, sequence_parallel=sequence_parallel)
    _ = world.meshes.tp  # made by all ranks together
    shared = shared_places(model)
    _split_head_and_embedding(model, styled_modules, world, sequence_parallel=sequence_parallel)
    mixtures = tuple(
        f"{name}.{child}."
        for name, layer in layers_and_depths(model).items()
        for child, module in layer.named_children()
        if layer_experts(module)
    )
    head = model.get_output_embeddings()  # which is split already, or stays whole
    for name, module, style, parameter in styled_modules:
        in_parts = sequence_parallel and not name.startswith(mixtures)  # a block of experts gets and returns all rows
        if is_adapted(module) and style in ADAPTED and module is not head:
            split_adapted_linear(module, style, world, sequence_parallel=in_parts)
        elif style == tp_style.MIXER:
            split_mixer(name, module, world, sequence_parallel=in_parts)
        elif style == tp_style.PARTIAL_GRADIENT:
            sum_partial_gradients(module, world.key, parameter)
        elif style == tp_style.HEADS and parameter is not None:
            slice_parameter(module, parameter, 0, world)
            wrap_forward(module, views={parameter: local_tensor})
        elif isinstance(module, nn.Linear) and style == tp_style.ROWWISE:
            split_rows(module, world, sequence_parallel=in_parts)
        elif isinstance(module, nn.Linear) and style in _SPLITS and not (module is head and style in tp_style.GATHERED):
            _SPLITS[style](module, world)
    share_parameters_again(shared)
    # Split blocks sum over tp the gradients of their inputs, which are partial. Under sequence parallelism those
    # outside of blocks of experts are given this rank's part of the rows, and gather all.
    copy_input: Transform = partial(tp_copy, world_key=world.key)
    gather_input: Transform = partial(tp_gather, world_key=world.key, dim=ROWS, gradient="partial")
    for name in sorted(split_block_names(styled_modules)):
        whole = not sequence_parallel or name.startswith(mixtures)
        wrap_forward(model.get_submodule(name), enter=copy_input if whole else gather_input)
    for layer in layers_and_depths(model).values():
        for experts in expert_modules(layer).values():  # others, as Llama 4's, are whole on every rank
            split_expert_rows(experts, world.key, sum_gradients=sum_expert_gradients)
    if sequence_parallel:
        split_residuals(model, styled_modules, world)


_SPLITS = {
    tp_style.COLWISE: split_columns,
    tp_style.PACKED: split_packed_columns,
    tp_style.SPLIT_INPUT: split_whole_inputs,
    **dict.fromkeys(tp_style.GATHERED, split_and_gather_columns),
}


def _split_head_and_embedding(
    model: PreTrainedModel, styled_modules: list[StyledModule], world: World, *, sequence_parallel: bool
) -> None:
    """A tied embedding is split with the head, whose weight it shares. If an adapter changes the head or the embedding,
    neither is split. Where rows are split between layers (`sequence_parallel`), an embedding hands on only this rank's
    rows: a whole one by slicing its output, a split one as it sums over ranks.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if is_adapted(embedding) or is_adapted(head):
        if sequence_parallel and not isinstance(embedding, Absent):  # absent: on another pipeline stage
            wrap_forward(embedding, leave=partial(tp_split, world_key=world.key, dim=ROWS))
        return
    head = head if isinstance(head, nn.Linear) else None
    embedding = embedding if isinstance(embedding, nn.Embedding) else None
    styles = {id(module): style for _, module, style, _ in styled_modules}
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    tp = world.home.tp
    head_fits = head is not None and head.weight.shape[0] % tp == 0
    embedding_fits = embedding is not None and embedding.weight.shape[0] % tp == 0
    if head is not None and head_fits and styles.get(id(head)) in tp_style.GATHERED:
        split_and_gather_columns(head, world)
        if embedding is not None and tied:
            embedding.weight = head.weight
    if embedding is not None and embedding_fits and styles.get(id(embedding)) == tp_style.EMBEDDING and not tied:
        slice_parameter(embedding, "weight", 0, world)
    if embedding is not None and isinstance(embedding.weight, DTensor):  # split here, or with the head
        split_vocabulary(embedding, world, sequence_parallel=sequence_parallel)
    elif embedding is not None and sequence_parallel:
        wrap_forward(embedding, leave=partial(tp_split, world_key=world.key, dim=ROWS))

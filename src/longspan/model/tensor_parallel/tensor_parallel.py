"""Tensor parallelism from a model's plan: heads, widths and vocabulary split over the `tp` ranks of a slot.

A slot's ranks hold the same tokens and loss. With sequence parallelism norms and residuals hold 1 / tp of the rows,
gathered before blocks and summed in parts after. A mixer's parameters are even slices, as checkpoints have them: other
rows are gathered when it runs. Norms over groups that lie on several ranks sum squares over these.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional as F
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.tp_collectives import (
    tp_copy,
    tp_copy_parameter,
    tp_gather,
    tp_index_and_degree,
    tp_split,
    tp_sum,
)
from longspan.errors import ModelError, plural
from longspan.model.adapted_modules import is_adapted
from longspan.model.experts.experts import ADAPTER_VIEW
from longspan.model.kinds import expert_modules
from longspan.model.layers import Absent, decoder_model, layers_and_mtp_blocks, mtp_depths
from longspan.model.parts import ModelParts, parts_with_outputs, trace_parts, usual_part_names
from longspan.model.seams.norms import count_groups
from longspan.model.tensor_parallel import plan as tp_style
from longspan.model.tensor_parallel.plan import (
    ROWWISE,
    MixerParts,
    StyledModule,
    check_divided_sizes,
    is_first_adapter_matrix,
    layer_experts,
    list_styles,
    mixer_parts,
    refuse_unnamed_parameters,
    sizes_divided_by_tp,
    split_block_names,
    tensors_of_part,
)
from longspan.model.tensor_parallel.styles import (
    LINEAR_STYLES,
    ROWS,
    Transform,
    View,
    reasons_against_adapter,
    shard_and_view_rows,
    slice_parameter,
    split_expert_rows,
    split_linear,
    split_vocabulary,
    sum_partial_gradients,
    wrap_forward,
)
from longspan.model.weights.local_tensors import local_tensor, tied_names

Means = Callable[[Tensor], Tensor]  # (…, features) -> the mean square of each feature's group, for each feature


def split_norm(norm: Any, world: World) -> None:
    """Have a norm take means of this rank's features by group, over the ranks that share a group.

    `sizes` are its features in the groups that it has a part of. When it runs, the caller has replaced its weight by
    this rank's part.
    """
    groups = count_groups(norm)
    key = world.key
    tp = world.home.tp
    total = norm.weight.numel()
    means: Means = partial(_local_means, groups=groups // tp)
    if groups % tp:  # some groups lie on several ranks
        size = total // groups
        features = total // tp
        first = world.coordinates.tp * features
        groups_here = range(first // size, (first + features - 1) // size + 1)
        sizes = [min((g + 1) * size, first + features) - max(g * size, first) for g in groups_here]
        means = partial(_means_over_ranks, groups=groups_here, sizes=sizes, count=groups, key=key)

    def forward(hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _apply_norm(norm, hidden_states, gate, norm.weight, means)

    norm.forward = forward


def _apply_norm(norm: Any, x: Tensor, gate: Tensor | None, weight: Tensor, means: Means) -> Tensor:
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide_dtype)
    gates = None if gate is None else F.silu(gate.to(wide_dtype))
    gate_first = not getattr(norm, "norm_before_gate", False)
    if gates is not None and gate_first:
        y = y * gates
    y = weight * (y * torch.rsqrt(means(y) + norm.variance_epsilon))
    if gates is not None and not gate_first:
        y = y * gates
    return y.to(x.dtype)


def _local_means(y: Tensor, groups: int) -> Tensor:
    means = y.unflatten(-1, (groups, -1)).square().mean(-1)
    return means.repeat_interleave(y.shape[-1] // groups, -1)


def _means_over_ranks(y: Tensor, groups: range, sizes: list[int], count: int, key: int) -> Tensor:
    """y (…, features here) has `sizes` features of each of this rank's `groups`, a range of all `count`.

    Sums of squares are padded with zeros to all groups and summed over tp; a group has (size of y) · tp / `count`
    features. Each rank uses the means for its own features: their gradients are summed over tp too.
    """
    sums_of_groups = [group_features.square().sum(-1) for group_features in y.split(sizes, -1)]
    sums = torch.stack(sums_of_groups, -1)  # (…, groups here)
    sums = F.pad(sums, (groups.start, count - groups.stop))  # (…, count)
    means = tp_copy(tp_sum(sums, key), key) / (y.shape[-1] * tp_index_and_degree(key)[1] // count)
    means_here = means[..., groups.start : groups.stop].split(1, -1)
    return torch.cat(
        [mean.expand(*mean.shape[:-1], size) for mean, size in zip(means_here, sizes, strict=True)], -1
    )


def refuse_unsplittable_mixer(name: str, mixer: nn.Module, tp: int) -> None:
    """Raise ModelError for an unknown mixer, or one with an unknown norm over features; tp is checked elsewhere."""
    norm: Any = _find_feature_norm(mixer, mixer_parts(name, mixer, tp))
    if norm is None:
        return
    features = norm.weight.numel()
    groups = count_groups(norm)
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = torch.randn(3, 1, 2, features, dtype=torch.float64, generator=generator).unbind()
    try:
        norm_output = functional_call(norm, {"weight": weight[0, 0]}, (x, gate))
        ours = _apply_norm(norm, x, gate, weight[0, 0], partial(_local_means, groups=groups))
        equal = torch.allclose(norm_output, ours, rtol=1e-4, atol=1e-5)
    except Exception:  # whatever a norm raises that takes other arguments
        equal = False
    if not equal:
        raise ModelError(
            f"{name}.norm ({type(norm).__name__}) is not an RMS norm over {plural(groups, 'group')} of features, "
            "before or after its gate, and its features would be on several tensor-parallel ranks; use tp 1"
        )


def split_mixer(name: str, mixer: nn.Module, world: World, *, sequence_parallel: bool) -> None:
    """Split a mixer over the tensor-parallel ranks.

    Its input's gradient is partial, its output whole, or parts of rows.
    """
    tp = world.home.tp
    parts = mixer_parts(name, mixer, tp)
    if norm := _find_feature_norm(mixer, parts):
        split_norm(norm, world)
    views = defaultdict[nn.Module, dict[str, View]](dict)
    for owner, attribute, view in _shard_and_view_parts(mixer, parts, world):
        if hasattr(owner, attribute):  # only some mixers of a kind may have it
            views[owner][attribute] = view
    split_linear(mixer.get_submodule(parts.output), ROWWISE, world, sequence_parallel=sequence_parallel)
    for owner, views_of_owner in views.items():
        wrap_forward(mixer, views=views_of_owner, owner=owner)


def _find_feature_norm(mixer: nn.Module, parts: MixerParts) -> nn.Module | None:
    norm: Any = getattr(mixer, "norm", None)
    return norm if "norm" in parts.rows and getattr(norm, "weight", None) is not None else None


def _shard_and_view_parts(
    mixer: nn.Module, parts: MixerParts, world: World
) -> Iterator[tuple[nn.Module, str, View]]:
    whole_view: View = partial(tp_copy_parameter, world_key=world.key)  # unchanged; its gradient is summed over tp
    for name, value in parts.attributes.items():
        owner, _, attribute = name.rpartition(".")
        number: Any = value  # a view gives a tensor otherwise
        yield mixer.get_submodule(owner), attribute, lambda _, number=number: number
    for part_name, rows in parts.rows.items():
        for name, owner, attribute in tensors_of_part(mixer, part_name):
            view = (
                whole_view if is_first_adapter_matrix(name) else shard_and_view_rows(owner, attribute, rows, world)
            )
            yield owner, attribute, view
    for part_name in parts.whole:
        for _, owner, attribute in tensors_of_part(mixer, part_name):
            yield owner, attribute, whole_view


def split_residuals(model: PreTrainedModel, styled_modules: list[StyledModule], world: World) -> None:
    """Let norms and residuals work on 1 / tp of a slot's rows, from the embedding to the last norm.

    Gradients of norms are summed over tp. The last norm gathers all rows of its output; depths take their part of these
    again.
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

    The latter are blocks of experts and unsplit attention; split blocks gather rows themselves.
    """
    single_row_modules, full_row_modules = list[nn.Module](), list[nn.Module]()
    blocks = split_block_names(styled_modules)
    for child, module in layer.named_children():
        child_name = f"{name}.{child}"
        if layer_experts(module) or (child_name not in blocks and type(module).__name__.endswith("Attention")):
            full_row_modules.append(module)
        elif is_adapted(module) or not any(
            True for _ in module.children()
        ):  # a norm, or a linear of whole features
            single_row_modules.append(module)
        elif any(block.startswith(f"{child_name}.") for block in blocks):  # a layer around layers, as in Zamba 2
            inside = single_and_full_row_modules(child_name, module, styled_modules)
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

    ModelError without one, or embedding or layers.
    """
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


def refuse_tensor_parallel(model: PreTrainedModel, world: World, *, sequence_parallel: bool) -> None:
    """Raise ModelError, before anything is changed, for a model that cannot be split over the world's tp."""
    tp = world.home.tp
    if tp == 1 and sequence_parallel:
        raise ModelError(
            "sequence_parallel splits rows over tensor-parallel ranks, the home has tp 1; leave it out"
        )
    if tp == 1:
        return
    styled_modules = list_styles(model)
    if reasons := [*reasons_against_adapter(model, styled_modules)]:
        raise ModelError(f"the adapter of {type(model).__name__} cannot be split: {'; '.join(reasons)}; use tp 1")
    check_divided_sizes(sizes_divided_by_tp(model, styled_modules), tp, type(model).__name__)
    for name, module, style, _ in styled_modules:
        if style == tp_style.MIXER:
            refuse_unsplittable_mixer(name, module, tp)
    refuse_unnamed_parameters(model, styled_modules)
    if sequence_parallel:
        for name, layer in layers_and_mtp_blocks(model).items():
            single_and_full_row_modules(name, layer, styled_modules)  # here only to raise
        refuse_sequence_parallel(model)


def split_over_ranks(
    model: PreTrainedModel, world: World, *, sequence_parallel: bool, sum_expert_gradients: bool
) -> None:
    """Split the model over the tensor-parallel ranks of this slot; all ranks call it together, before FSDP2.

    `sum_expert_gradients` is for parameters that nobody else shards over `world.meshes.expert`.
    """
    styled_modules = list_styles(model)
    _ = world.meshes.tp  # made by all ranks together
    tied = tied_names(model)
    _split_head_and_embedding(model, styled_modules, world, sequence_parallel=sequence_parallel)
    mixtures = tuple(
        f"{name}.{child}."
        for name, layer in layers_and_mtp_blocks(model).items()
        for child, module in layer.named_children()
        if layer_experts(module)
    )
    head = model.get_output_embeddings()  # which is split already, or stays whole
    for name, module, style, parameter in styled_modules:
        # a block of experts gets and returns all rows
        in_parts = sequence_parallel and not name.startswith(mixtures)
        adapted = is_adapted(module) and module is not head
        is_linear = isinstance(module, nn.Linear) and not (module is head and style in tp_style.GATHERED)
        if style == tp_style.MIXER:
            split_mixer(name, module, world, sequence_parallel=in_parts)
        elif style == tp_style.PARTIAL_GRADIENT and not adapted:
            sum_partial_gradients(module, world.key, parameter)
        elif style == tp_style.HEADS and parameter is not None:
            slice_parameter(module, parameter, 0, world)
            wrap_forward(module, views={parameter: local_tensor})
        elif style in LINEAR_STYLES and (adapted or is_linear):
            split_linear(module, style, world, sequence_parallel=in_parts)
    for name, first_name in tied.items():  # all that share a parameter take the first one's slice
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path).register_parameter(attribute, model.get_parameter(first_name))
    # Split blocks sum over tp the gradients of their inputs, which are partial. Under sequence parallelism those
    # outside of blocks of experts are given this rank's part of the rows, and gather all.
    copy_input: Transform = partial(tp_copy, world_key=world.key)
    gather_input: Transform = partial(tp_gather, world_key=world.key, dim=ROWS, gradient="partial")
    for name in sorted(split_block_names(styled_modules)):
        whole = not sequence_parallel or name.startswith(mixtures)
        wrap_forward(model.get_submodule(name), enter=copy_input if whole else gather_input)
    for layer in layers_and_mtp_blocks(model).values():
        for experts in expert_modules(layer).values():  # others, as Llama 4's, are whole on every rank
            split_expert_rows(experts, world.key, sum_gradients=sum_expert_gradients)
            vars(experts)[ADAPTER_VIEW] = partial(tp_copy_parameter, world_key=world.key)
    if sequence_parallel:
        split_residuals(model, styled_modules, world)


def _split_head_and_embedding(
    model: PreTrainedModel, styled_modules: list[StyledModule], world: World, *, sequence_parallel: bool
) -> None:
    """A tied embedding is split with the head; where an adapter changes either, neither is split.

    Where rows are split between layers, an embedding hands on this rank's rows: sliced, or as it sums over ranks.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    styles = {id(module): style for _, module, style, _ in styled_modules}
    adapted = is_adapted(embedding) or is_adapted(head)

    def splits(module: Any, *of_styles: str) -> bool:
        has_rows = isinstance(module, nn.Linear | nn.Embedding) and module.weight.shape[0] % world.home.tp == 0
        return has_rows and not adapted and styles.get(id(module)) in of_styles

    both_here = isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding)
    tied = both_here and head.weight is embedding.weight
    if splits(head, *tp_style.GATHERED):
        split_linear(head, styles[id(head)], world)
        if tied:
            embedding.weight = head.weight
    if splits(embedding, tp_style.EMBEDDING) and not tied:
        slice_parameter(embedding, "weight", 0, world)
    if isinstance(getattr(embedding, "weight", None), DTensor):  # split here, or with the head
        split_vocabulary(embedding, world, sequence_parallel=sequence_parallel)
    elif sequence_parallel and not isinstance(embedding, Absent):  # absent: on another pipeline stage
        wrap_forward(embedding, leave=partial(tp_split, world_key=world.key, dim=ROWS))

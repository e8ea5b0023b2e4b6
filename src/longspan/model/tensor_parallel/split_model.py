"""A whole model split by its tensor-parallel plan: heads, widths and vocabulary over the `tp` ranks of a slot.

A slot's ranks hold the same tokens and loss. What cannot be split exactly is refused before anything is changed.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.tp_collectives import (
    tp_copy,
    tp_copy_parameter,
    tp_gather,
    tp_split,
)
from longspan.errors import ModelError
from longspan.model.adapted_modules import has_trained_copy, is_adapted, is_expert_adapter, peft_modules
from longspan.model.adapters.adapter import find_adapter
from longspan.model.experts.expert_products import ADAPTER_VIEW
from longspan.model.feature import Feature
from longspan.model.kinds import class_forward, expert_modules
from longspan.model.layers import Absent, base_model, layers_and_mtp_blocks
from longspan.model.tensor_parallel import module_styles as tp_style
from longspan.model.tensor_parallel.module_styles import (
    MIXER,
    StyledModule,
    check_divided_sizes,
    list_styles,
    modules_named_experts,
    refuse_unnamed_parameters,
    sizes_divided_by_tp,
    split_block_names,
)
from longspan.model.tensor_parallel.sequence_parallel import (
    refuse_sequence_parallel,
    single_and_full_row_modules,
    split_residuals,
)
from longspan.model.tensor_parallel.split_mixers import refuse_unsplittable_mixer, split_mixer
from longspan.model.tensor_parallel.split_modules import (
    LINEAR_STYLES,
    ROWS,
    Transform,
    slice_parameter,
    split_expert_rows,
    split_linear,
    split_vocabulary,
    sum_partial_gradients,
    wrap_forward,
)
from longspan.model.tensor_parallel.split_trial import refuse_mixed_features
from longspan.model.weights.local_tensors import local_tensor
from longspan.model.weights.tied_names import tied_names


class TensorParallelFeature(Feature):
    """Layers split over the tensor-parallel ranks of a slot, with or without rows split between them."""

    def refuse(self, model: PreTrainedModel) -> None:
        """Raise ModelError for a model that cannot be split exactly over tp, also by a trial on the host."""
        tp = self.world.home.tp
        if tp == 1:
            raise ModelError(
                "sequence_parallel splits rows over tensor-parallel ranks, the home has tp 1; leave it out"
            )
        styled_modules = list_styles(model)
        if reasons := [*reasons_against_adapter(model, styled_modules)]:
            raise ModelError(
                f"the adapter of {type(model).__name__} cannot be split: {'; '.join(reasons)}; use tp 1"
            )
        check_divided_sizes(sizes_divided_by_tp(model, styled_modules), tp, type(model).__name__)
        for name, module, style, _ in styled_modules:
            if style == tp_style.MIXER:
                refuse_unsplittable_mixer(name, module, tp)
        refuse_unnamed_parameters(model, styled_modules)
        if self.options.sequence_parallel:
            for name, layer in layers_and_mtp_blocks(model).items():
                single_and_full_row_modules(name, layer, styled_modules)  # here only to raise
            refuse_sequence_parallel(model)
        refuse_mixed_features(model, styled_modules)

    def place(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Split a model, or a pipeline stage's part of it, over the ranks of this slot, in place; all ranks enter.

        Modules are split by their styles, then split blocks and experts are wrapped as wholes, and last the residuals
        between them. It comes before FSDP2.
        """
        world = self.world
        sequence_parallel = self.options.sequence_parallel
        styled_modules = list_styles(model)
        _ = world.meshes.tp  # made by all ranks together
        tied = tied_names(model)
        _split_head_and_embedding(model, styled_modules, world, sequence_parallel=sequence_parallel)
        expert_blocks = tuple(  # names of blocks of experts, which get and return all rows
            f"{name}.{child}."
            for name, layer in layers_and_mtp_blocks(model).items()
            for child, module in layer.named_children()
            if modules_named_experts(module)
        )
        # The head is split already, or stays whole.
        head = model.get_output_embeddings()
        for name, module, style, parameter in styled_modules:
            splits_rows = sequence_parallel and not name.startswith(expert_blocks)
            adapted = is_adapted(module) and module is not head
            is_linear = isinstance(module, nn.Linear) and not (module is head and style in tp_style.GATHERED)
            if style == tp_style.MIXER:
                split_mixer(name, module, world, sequence_parallel=splits_rows)
            elif style == tp_style.PARTIAL_GRADIENT and not adapted:
                sum_partial_gradients(module, world.key, parameter)
            elif style == tp_style.HEADS and parameter is not None:
                slice_parameter(module, parameter, 0, world)
                wrap_forward(module, views={parameter: local_tensor})
            elif style in LINEAR_STYLES and (adapted or is_linear):
                split_linear(module, style, world, sequence_parallel=splits_rows)
        # All names of a parameter take the first one's slice.
        for name, first_name in tied.items():
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path).register_parameter(attribute, model.get_parameter(first_name))
        # Split blocks sum over tp the gradients of their inputs, which are partial. Under sequence parallelism those
        # outside of blocks of experts are given this rank's part of the rows, and gather all.
        copy_input: Transform = partial(tp_copy, world_key=world.key)
        gather_input: Transform = partial(tp_gather, world_key=world.key, dim=ROWS, gradient="partial")
        for name in sorted(split_block_names(styled_modules)):
            # The input of a whole block has all rows.
            whole = not sequence_parallel or name.startswith(expert_blocks)
            wrap_forward(model.get_submodule(name), enter=copy_input if whole else gather_input)
        for layer in layers_and_mtp_blocks(model).values():
            # Other experts, as Llama 4's, are whole on every rank.
            for experts in expert_modules(layer).values():
                # Without FSDP2 nobody else sums gradients of experts over tp.
                split_expert_rows(experts, world.key, sum_gradients=not self.options.shard_parameters)
                vars(experts)[ADAPTER_VIEW] = partial(tp_copy_parameter, world_key=world.key)
        if sequence_parallel:
            split_residuals(model, styled_modules, world)


def _split_head_and_embedding(
    model: PreTrainedModel, styled_modules: list[StyledModule], world: World, *, sequence_parallel: bool
) -> None:
    """A tied embedding is split with the head; where an adapter changes either, or the base model's own forward reads
    the row of padding in the weight (Gemma 4), neither is split. With `sequence_parallel` the embedding hands on this
    rank's rows alone: of its sum over tp if it is split, else cut from its output."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    styles = {id(module): style for _, module, style, _ in styled_modules}
    adapted = is_adapted(embedding) or is_adapted(head)
    reads_weight = {"weight", "pad_token_id"} <= {*class_forward(base_model(model)).__code__.co_names}

    def can_split(module: Any, *split_styles: str) -> bool:
        """Return whether a module has one of these styles and tp divides its rows, one for each token id."""
        divides = isinstance(module, nn.Linear | nn.Embedding) and module.weight.shape[0] % world.home.tp == 0
        return divides and not adapted and not reads_weight and styles.get(id(module)) in split_styles

    both_here = isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding)
    tied = both_here and head.weight is embedding.weight
    if can_split(head, *tp_style.GATHERED):
        split_linear(head, styles[id(head)], world)
        if tied:
            embedding.weight = head.weight
    if can_split(embedding, tp_style.EMBEDDING) and not tied:
        slice_parameter(embedding, "weight", 0, world)
    if isinstance(getattr(embedding, "weight", None), DTensor):  # split here, or with the head
        split_vocabulary(embedding, world, sequence_parallel=sequence_parallel)
    elif sequence_parallel and not isinstance(embedding, Absent):  # absent: on another pipeline stage
        wrap_forward(embedding, leave=partial(tp_split, world_key=world.key, dim=ROWS))


def reasons_against_adapter(model: PreTrainedModel, styled_modules: Sequence[StyledModule]) -> Iterator[str]:
    """Yield why an adapter would not be exact under tensor parallelism.

    Each adapted linear needs a style that is known, a mixer around it, or a place outside of split blocks. Adapters of
    the embedding and of the head stay whole.
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
    if copied := [name for name, module in modules.items() if has_trained_copy(module)]:
        yield f"modules_to_save ({', '.join(copied[:2])}) are not split"
    styles = {entry.name: entry.style for entry in styled_modules}
    embedding_and_head = (model.get_input_embeddings(), model.get_output_embeddings())
    blocks = split_block_names(styled_modules)
    elsewhere = {module for module in modules.values() if is_expert_adapter(module)} | {*embedding_and_head}
    linears = [name for name, module in modules.items() if is_adapted(module) and module not in elsewhere]
    # A linear with a style is split by it. Without one, it is split by a mixer around it, or stays whole outside of
    # split blocks; inside attention or an MLP that is split, its gradient would be partial.
    blocks_around = {name: [block for block in blocks if name.startswith(f"{block}.")] for name in linears}
    placed = {name for name in linears if styles.get(name) in LINEAR_STYLES}
    placed |= {
        name
        for name, outer in blocks_around.items()
        if name not in styles and all(styles.get(block) == MIXER for block in outer)
    }
    if unplaced := [name for name in linears if name not in placed]:
        yield f"no tensor-parallel style of an adapter is known for {unplaced[0]} ({styles.get(unplaced[0], 'none')})"

"""The adapter that a checkpoint holds, in the names of the stock model, and its sum with the base model's weights.

The folder that `longspan export` makes of either is written in `export.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.config.sections import RunConfig
from longspan.errors import CheckpointError
from longspan.model.adapted_modules import belongs_to_adapter
from longspan.model.adapters.adapter import AdaptedWeight, Adapter, adapted_weights, find_adapter
from longspan.model.adapters.adapter_files import entries_inside_modules, largest_trained_modules
from longspan.model.kinds import name_without_adapter
from longspan.model.load import find_score_class
from longspan.model.multimodal.multimodal_model import map_stock_names
from longspan.model.parts import is_tied
from longspan.model.presets import PRESETS
from longspan.model.weights.empty_model import empty_model, image_text_class_of_architectures
from longspan.model.weights.fill import pop_deferred_weights, stored_formats
from longspan.model.weights.local_tensors import LocalPart
from longspan.model.weights.write import (
    weight_unit,
)
from longspan.plain_text import LogLine
from longspan.train.run_model.load import add_configured_adapter, load_run_model
from longspan.train.run_model.mtp import add_configured_mtp, find_depth_weights


class SavedAdapter(NamedTuple):
    """The adapter of a run, its whole tensors by name, and what it adds to which weights, by their stock names.

    The tensors of `modules`, a tower or a projector that was trained with it, are among them.
    """

    adapter: Adapter
    tensors: Mapping[str, Tensor]
    weights: Mapping[str, AdaptedWeight]
    modules: tuple[str, ...] = ()


def make_saved_adapter(
    run: RunConfig, configuration: PreTrainedConfig, stored: Mapping[str, Tensor]
) -> SavedAdapter:
    """Return a run's adapter with the tensors that its checkpoint has `stored`, by their names in the stock model.

    Names and scalings are found by adding what [lora] describes to a model without weights. Other tensors are of
    modules that were trained whole. Raises CheckpointError if the tensors have other names.
    """
    tensors = {name: stored[stored_name] for name, stored_name in map_stock_names(stored).items()}
    kind = find_score_class(configuration) or image_text_class_of_architectures(configuration)
    stock = empty_model(configuration, torch.float32, kind)
    empty = add_configured_mtp(run, stock, read=False)
    modules = largest_trained_modules(empty, {name for name in tensors if not belongs_to_adapter(name)})
    model = add_configured_adapter(run, empty).get_base_model()
    adapter = find_adapter(model)
    assert adapter is not None
    names = {name for name, _ in model.named_parameters() if belongs_to_adapter(name)}
    names |= entries_inside_modules(modules, dict(model.named_parameters())).keys()
    if names != tensors.keys():
        raise CheckpointError(
            f"the checkpoint has {len(tensors)} tensors, the adapter of [lora] in {run.run.dir}/config.toml "
            f"{len(names)}; different are {', '.join(sorted(names ^ tensors.keys())[:4])}"
        )
    weights = {name_without_adapter(name): adapted for name, adapted in adapted_weights(model).items()}
    return SavedAdapter(adapter, tensors, weights, modules)


def merge_weights_by_layer(
    saved: SavedAdapter, run: RunConfig, configuration: PreTrainedConfig, log: LogLine
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of the base model with the adapter added, those of a layer together.

    Those that the adapter changes are in float32, or in float64 if the run's model is. Where they were frozen in 4 or 8
    bits, a line says to what the adapter is added. Raises CheckpointError if the base model cannot be made again here,
    and for an adapter of a tied head.
    """
    _check_random_weights(run, configuration)
    images = image_text_class_of_architectures(configuration) is not None
    model = load_run_model(run, configuration, images=images)
    _refuse_adapted_tie(saved, model)
    base = run.model.source or run.model.preset_name
    formats = sorted({packed.name for packed in stored_formats(model).values()})
    if run.model.frozen == "nf4":
        log(
            f"the adapter was trained over 4-bit values (model.frozen = nf4) of the weights of {base}, and "
            "is added to these weights themselves"
        )
    elif formats:
        log(f"{base} holds its weights in {' and '.join(formats)}: the adapter is added to their values")
    wide = torch.float64 if run.model.dtype == "float64" else torch.float32
    deferred = pop_deferred_weights(model)
    weights: Iterable[tuple[str, Tensor]] = model.state_dict().items()
    if deferred is not None:
        parts = {name: LocalPart.from_parameter(tensor) for name, tensor in weights}
        weights = deferred.source.read(parts, torch.device("cpu"))
    for _, group in groupby(weights, lambda entry: weight_unit(entry[0])):
        yield {name: merge_weight(saved, name, tensor, wide) for name, tensor in group}


def merge_weight(saved: SavedAdapter, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight of the base model plus what the adapter adds to it, W + s B A, added in `dtype`.

    s is the adapter's scaling of this weight, A and B are its two matrices. A weight that was trained whole is returned
    as it was trained.
    """
    linear = name.removesuffix(".weight")
    adapter = saved.adapter.name
    for trained in (name, f"{linear}.modules_to_save.{adapter}.weight"):
        if trained in saved.tensors:
            return saved.tensors[trained]
    if (adapted := saved.weights.get(name)) is None:
        return weight
    matrix_a, matrix_b = (
        saved.tensors[f"{adapted.module}.lora_{matrix_name}.{adapter}.weight"].to(dtype) for matrix_name in "AB"
    )
    return weight.to(dtype) + adapted.added_matrix(matrix_a, matrix_b)


def _check_random_weights(run: RunConfig, configuration: PreTrainedConfig) -> None:
    """Raise CheckpointError for weights, of a base model or its depths, that another device would draw differently."""
    name = run.model.preset_name
    drawn_depths = run.mtp.num_layers and not run.mtp.train_whole and find_depth_weights(run, configuration) is None
    # Nothing was drawn, or a tiny preset (no `embedding_rows`): its weights are drawn on the CPU on every machine.
    if (not run.model.path or drawn_depths) and not (name and not PRESETS[name].embedding_rows):
        raise CheckpointError(
            f"{run.run.dir}: {'depths have' if run.model.path else 'the base model has'} random weights, of which each "
            "device draws others; export the adapter alone, without --merge"
        )


def _refuse_adapted_tie(saved: SavedAdapter, model: PreTrainedModel) -> None:
    """Raise CheckpointError for an adapter of an embedding that is also the head: the sum would change both."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = [
        name for name, module in model.named_modules() if module in embeddings and f"{name}.weight" in saved.weights
    ]
    if adapted and is_tied(model):
        raise CheckpointError(
            f"--merge: {adapted[0]} has an adapter, and shares its weight with the other end of the "
            f"{type(model).__name__} (tie_word_embeddings), which must not change; export the adapter without --merge, "
            "which stock peft loads over the base model, or train one without it in lora.target_modules"
        )

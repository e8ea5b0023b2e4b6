"""A checkpoint of an adapter as a folder that stock peft loads, or merged into its base model, a layer at a time."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer_files import KeptFiles
from longspan.errors import CheckpointError, ConfigError
from longspan.model.adapters import Adapter, adapter_in, belongs_to_adapter, peft_modules
from longspan.model.lora.save import WEIGHTS, write_adapter
from longspan.model.lora.trained_modules import entries_of, trained_modules
from longspan.model.parts import is_tied
from longspan.model.presets import PRESETS
from longspan.model.vision.join import own_names
from longspan.model.weights.empty import empty_model, named_images_class
from longspan.model.weights.fill import take_weights_to_come
from longspan.model.weights.held import HeldPart
from longspan.model.weights.write import Written, unit_of
from longspan.train.terms.mtp import add_configured_depths, depth_weights
from longspan.train.training import add_configured_adapter, load_run_model


class SavedAdapter(NamedTuple):
    """The adapter of a run, its whole tensors by name, and what the output of each adapted linear is scaled by.

    Tensors of `modules`, a tower or a projector, that were trained beside it are among them.
    """

    adapter: Adapter
    tensors: Mapping[str, Tensor]
    scalings: Mapping[str, float]
    modules: tuple[str, ...] = ()


def saved_adapter(run: RunConfig, configuration: PreTrainedConfig, stored: Mapping[str, Tensor]) -> SavedAdapter:
    """A run's adapter, of these tensors. Raises CheckpointError for tensors that [lora] does not describe."""
    tensors = {own: stored[name] for own, name in own_names(stored).items()}
    stock = empty_model(configuration, torch.float32, named_images_class(configuration))
    empty = add_configured_depths(run, stock, read=False)
    modules = trained_modules(empty, {name for name in tensors if not belongs_to_adapter(name)})
    model = add_configured_adapter(run, empty).get_base_model()
    adapter = adapter_in(model)
    assert adapter is not None
    layers: dict[str, Any] = {**peft_modules(model)}
    wanted = {name for name, _ in model.named_parameters() if ".lora_" in name}
    wanted |= entries_of(modules, dict(model.named_parameters())).keys()
    if wanted != tensors.keys():
        raise CheckpointError(
            f"the checkpoint has {len(tensors)} tensors, the adapter of [lora] in {run.run.dir}/config.toml "
            f"{len(wanted)}; different are {', '.join(sorted(wanted ^ tensors.keys())[:4])}"
        )
    scalings = {name: layer.scaling[adapter.name] for name, layer in layers.items()}
    return SavedAdapter(adapter, tensors, scalings, modules)


def write_saved_adapter(saved: SavedAdapter, folder: Path, run_dir: Path, dtype: torch.dtype | None) -> Written:
    """Write an adapter to a folder, with the tokenizer that the run keeps."""
    tensors = {name: tensor.to(dtype=dtype) for name, tensor in saved.tensors.items()}
    write_adapter(folder, saved.adapter, tensors, KeptFiles(run_dir), saved.modules)
    return Written(len(tensors), sum(x.numel() for x in tensors.values()), (folder / WEIGHTS).stat().st_size, 1)


def merged_groups(
    saved: SavedAdapter, run: RunConfig, configuration: PreTrainedConfig, run_dir: Path
) -> Iterator[dict[str, Tensor]]:
    """The weights of the base model with the adapter added, those of a layer together, in float32 or float64.

    Raises CheckpointError where the base model cannot be had again here, and for an adapter of a tied head alone.
    """
    _check_base(run, configuration, run_dir)
    images = named_images_class(configuration) is not None
    model = load_run_model(run, configuration.get_text_config().vocab_size, configuration, images=images)
    _check_tied(saved, model)
    wide = torch.float64 if run.model.dtype == "float64" else torch.float32
    for _, group in groupby(_weights(model), lambda entry: unit_of(entry[0])):
        yield {name: merged(saved, name, tensor, wide) for name, tensor in group}


def merged(saved: SavedAdapter, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight of the base model with what the adapter adds to it: W + s B A; one that was trained beside it."""
    if name in saved.tensors:
        return saved.tensors[name]
    linear, adapter = name.removesuffix(".weight"), saved.adapter.name
    if linear not in saved.scalings:
        return weight
    first, second = (saved.tensors[f"{linear}.lora_{part}.{adapter}.weight"].to(dtype) for part in "AB")
    return weight.to(dtype) + saved.scalings[linear] * (second @ first)


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The whole weights of a model, those that are yet to come one at a time."""
    weights = take_weights_to_come(model)
    if weights is None:
        yield from model.state_dict().items()
        return
    whole = {name: HeldPart.of(tensor) for name, tensor in model.state_dict().items()}
    yield from weights.source.read(whole, torch.device("cpu"))


def _check_base(run: RunConfig, configuration: PreTrainedConfig, run_dir: Path) -> None:
    """Raise CheckpointError for a base model, or depths, that were drawn on a GPU, where other numbers are drawn."""
    name = run.model.preset_name
    drawn_depths = run.mtp.depths and depth_weights(run, configuration) is None
    if (run.model.path and not drawn_depths) or (name and not PRESETS[name].rows):
        return
    try:
        device = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["device"]
    except (OSError, ValueError, KeyError, TypeError):
        device = "an unknown device"
    if device != "CPU":
        raise CheckpointError(
            f"{run_dir}: the {'depths have' if run.model.path else 'base model has'} random weights that were drawn on "
            f"{device}, and a CPU draws others; export the adapter alone, without --merge"
        )


def _check_tied(saved: SavedAdapter, model: PreTrainedModel) -> None:
    """Raise CheckpointError where one of two modules that share a weight is adapted, which no merged weight can be."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted_ends = [name for name, module in model.named_modules() if module in ends and name in saved.scalings]
    if adapted_ends and is_tied(model):
        raise CheckpointError(
            f"--merge: {adapted_ends[0]} has an adapter, and shares its weight with the other end of the "
            f"{type(model).__name__} (tie_word_embeddings), which must not change; export the adapter without --merge, "
            "which stock peft loads over the base model, or train one without it in lora.targets"
        )


def refuse_merge(run_dir: Path) -> None:
    """Raise ConfigError where a run trained all weights."""
    raise ConfigError(f"--merge is given, and {run_dir} trained all weights (lora.rank is 0); leave it out")

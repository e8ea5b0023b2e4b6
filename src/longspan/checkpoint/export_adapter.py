"""What an export does with an adapter (a folder that stock peft loads, or merged into its base model) and with depths.

The base model is read a layer at a time. Depths of multi-token prediction are written under published names, under
ours, or left out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.comm.all_ranks import LogLine
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import RunFolderFiles
from longspan.errors import CheckpointError, ConfigError, plural
from longspan.files import read_json
from longspan.model.adapters import Adapter, belongs_to_adapter, find_adapter, peft_modules
from longspan.model.add_depths import add_mtp
from longspan.model.lora.save import WEIGHTS, largest_trained_modules, select_entries, write_adapter
from longspan.model.mtp.depths import mtp_blocks
from longspan.model.mtp.names import PREFIX, publication_names
from longspan.model.multimodal.multimodal_model import map_stock_names
from longspan.model.parts import is_tied
from longspan.model.presets import PRESETS
from longspan.model.weights.fill import empty_model, find_images_class, pop_deferred_weights
from longspan.model.weights.local_tensors import LocalPart
from longspan.model.weights.write import WeightTotals, weight_unit
from longspan.train.terms.mtp import add_configured_depths, find_depth_weights
from longspan.train.training import add_configured_adapter, load_run_model

Value = TypeVar("Value")
MtpNames = Literal["published", "own", "none"]
"""published: as models of the family are published, own where there is no such name; own: mtp.layers.0 and so on."""


@dataclass(frozen=True)
class ExportedDepths:
    """How the depths of a run's model are written: `rename` turns our name of a weight into its name in the files."""

    rename: Callable[[str], str]
    left_out: bool = False

    @classmethod
    def of(cls, run: RunConfig, empty: PreTrainedModel, names: MtpNames, log: LogLine) -> "ExportedDepths":
        """Add the depths that are written, to the stock model `empty`, and log under which names they are written.

        Published names are taken where the family has them: then the model's configuration also describes its depths,
        as published configurations do. Without depths nothing is added or logged.
        """
        depths, text = run.mtp.depths, empty.config.get_text_config()
        own_names = cls(lambda name: name, left_out=names == "none")
        if not depths:
            return own_names
        title = f"{plural(depths, 'depth')} of multi-token prediction"
        if own_names.left_out:
            log(f"{title}: left out")
            return own_names
        blocks: list[Any] = [*mtp_blocks(add_mtp(empty, depths)).values()]
        blocks = blocks[: len(blocks) // depths]  # of the first depth; every depth has blocks of the same types
        published = publication_names(text.model_type, text.num_hidden_layers, depths, len(blocks))
        rename = published if names == "published" else None
        if rename is None:
            log(f"{title}: under {PREFIX}.layers.0.… and so on, which longspan reads and stock transformers leaves out")
            return own_names
        config: Any = text  # gets the keys with which published configurations describe depths
        config.num_nextn_predict_layers = depths
        if len(blocks) > 1:
            config.mtp_layers_block_type = [block.block_type for block in blocks]
        log(f"{title}: under the names of published {text.model_type} models, {rename(f'{PREFIX}.layers.0.eh_proj.…')}")
        return cls(rename)

    def select_weights(self, weights: Mapping[str, Value]) -> dict[str, Value]:
        """Return those of a checkpoint's weights, by name, that are written: all, or all but the depths'."""
        return {name: x for name, x in weights.items() if not (self.left_out and name.startswith(f"{PREFIX}."))}


class SavedAdapter(NamedTuple):
    """The adapter of a run, its whole tensors by name, and by which factor each adapted linear scales what it adds.

    The tensors of `modules`, a tower or a projector that was trained with it, are among them.
    """

    adapter: Adapter
    tensors: Mapping[str, Tensor]
    scalings: Mapping[str, float]
    modules: tuple[str, ...] = ()


def make_saved_adapter(run: RunConfig, configuration: PreTrainedConfig, stored: Mapping[str, Tensor]) -> SavedAdapter:
    """Return a run's adapter with the tensors that its checkpoint has `stored`, by their names in the stock model.

    Which names and scalings the adapter has is found by adding what [lora] describes to a model without weights.
    Tensors that are not the adapter's are of modules that were trained whole with it. Raises CheckpointError if the
    tensors have other names.
    """
    tensors = {name: stored[stored_name] for name, stored_name in map_stock_names(stored).items()}
    stock = empty_model(configuration, torch.float32, find_images_class(configuration))
    empty = add_configured_depths(run, stock, read=False)
    modules = largest_trained_modules(empty, {name for name in tensors if not belongs_to_adapter(name)})
    model = add_configured_adapter(run, empty).get_base_model()
    adapter = find_adapter(model)
    assert adapter is not None
    layers: dict[str, Any] = {**peft_modules(model)}
    names = {name for name, _ in model.named_parameters() if ".lora_" in name}
    names |= select_entries(modules, dict(model.named_parameters())).keys()
    if names != tensors.keys():
        raise CheckpointError(
            f"the checkpoint has {len(tensors)} tensors, the adapter of [lora] in {run.run.dir}/config.toml "
            f"{len(names)}; different are {', '.join(sorted(names ^ tensors.keys())[:4])}"
        )
    scalings = {name: layer.scaling[adapter.name] for name, layer in layers.items()}
    return SavedAdapter(adapter, tensors, scalings, modules)


def write_saved_adapter(saved: SavedAdapter, folder: Path, run_dir: Path, dtype: torch.dtype | None) -> WeightTotals:
    """Write an adapter to a folder in this dtype (None: its own), with the tokenizer that the run keeps.

    Returns the totals of its weights, which are one file.
    """
    tensors = {name: tensor.to(dtype=dtype) for name, tensor in saved.tensors.items()}
    write_adapter(folder, saved.adapter, tensors, RunFolderFiles(run_dir), saved.modules)
    return WeightTotals(len(tensors), sum(x.numel() for x in tensors.values()), (folder / WEIGHTS).stat().st_size, 1)


def merge_weights_by_layer(
    saved: SavedAdapter, run: RunConfig, configuration: PreTrainedConfig, run_dir: Path
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of the base model with the adapter added, those of a layer together.

    Those that the adapter changes are in float32, or in float64 if the run's model is. Raises CheckpointError if the
    base model cannot be made again here, and for an adapter of a tied head.
    """
    _check_random_weights(run, configuration, run_dir)
    images = find_images_class(configuration) is not None
    model = load_run_model(run, configuration.get_text_config().vocab_size, configuration, images=images)
    _refuse_adapted_tie(saved, model)
    wide = torch.float64 if run.model.dtype == "float64" else torch.float32
    for _, group in groupby(_read_base_weights(model), lambda entry: weight_unit(entry[0])):
        yield {name: merge_weight(saved, name, tensor, wide) for name, tensor in group}


def merge_weight(saved: SavedAdapter, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight of the base model plus what the adapter adds to it, W + s B A, added in `dtype`.

    s is the adapter's scaling of this weight, A and B are its two matrices. A weight without an adapter is returned as
    it is, and a weight that was trained whole in addition to the adapter as it was trained.
    """
    if name in saved.tensors:
        return saved.tensors[name]
    linear, adapter = name.removesuffix(".weight"), saved.adapter.name
    if linear not in saved.scalings:
        return weight
    matrix_a, matrix_b = (
        saved.tensors[f"{linear}.lora_{matrix_name}.{adapter}.weight"].to(dtype) for matrix_name in "AB"
    )
    return weight.to(dtype) + saved.scalings[linear] * (matrix_b @ matrix_a)


def _read_base_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    weights = pop_deferred_weights(model)
    if weights is None:
        yield from model.state_dict().items()
        return
    parts = {name: LocalPart.of(tensor) for name, tensor in model.state_dict().items()}
    yield from weights.source.read(parts, torch.device("cpu"))


def _check_random_weights(run: RunConfig, configuration: PreTrainedConfig, run_dir: Path) -> None:
    """Raise CheckpointError for random weights, of a base model or its depths, that this CPU would draw differently."""
    name = run.model.preset_name
    drawn_depths = run.mtp.depths and find_depth_weights(run, configuration) is None
    # Nothing was drawn, or a tiny preset was (without `rows`): its weights are drawn on the CPU on every machine.
    if (run.model.path and not drawn_depths) or (name and not PRESETS[name].rows):
        return
    try:
        device = read_json(run_dir / "run.json")["device"]
    except (OSError, ValueError, KeyError, TypeError):
        device = "an unknown device"
    if device != "CPU":
        raise CheckpointError(
            f"{run_dir}: the {'depths have' if run.model.path else 'base model has'} random weights that were drawn on "
            f"{device}, and a CPU draws others; export the adapter alone, without --merge"
        )


def _refuse_adapted_tie(saved: SavedAdapter, model: PreTrainedModel) -> None:
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = [name for name, module in model.named_modules() if module in embeddings and name in saved.scalings]
    if adapted and is_tied(model):
        raise CheckpointError(
            f"--merge: {adapted[0]} has an adapter, and shares its weight with the other end of the "
            f"{type(model).__name__} (tie_word_embeddings), which must not change; export the adapter without --merge, "
            "which stock peft loads over the base model, or train one without it in lora.targets"
        )


def refuse_merge(run_dir: Path) -> None:
    """Raise ConfigError for --merge of a run that trained all weights."""
    raise ConfigError(f"--merge is given, and {run_dir} trained all weights (lora.rank is 0); leave it out")

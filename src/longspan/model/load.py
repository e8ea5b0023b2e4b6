"""Models from a local Hugging Face folder, a configuration or a preset; nothing is downloaded."""

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from longspan.errors import ModelError, plural
from longspan.model.kinds import SCORE_HEADS
from longspan.model.layers import vocabulary_size
from longspan.model.presets import PRESETS, preset_config
from longspan.model.weights.drawn_weights import RandomWeights
from longspan.model.weights.empty_model import (
    choose_image_text_class,
    empty_model,
    image_text_class_of_architectures,
    new_model,
    set_dtypes,
)
from longspan.model.weights.fill import fill_now, fill_when_prepared
from longspan.model.weights.folder_weights import FolderWeights
from longspan.model.weights.hf_folder import (
    FOLDER_OPTIONS,
    no_progress_bars,
    quantization_settings,
    raise_model_error,
    read_configuration,
    read_generation_settings,
    weight_files,
)
from longspan.plain_text import items_text

if TYPE_CHECKING:
    from longspan.model.frozen.formats.storage_methods import StorageMethod

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str | Path | None = None,
    preset: str | None = None,
    *,
    config: PreTrainedConfig | str | Path | None = None,
    dtype: str | torch.dtype = "float32",
    seed: int = 0,
    vocab_size: int | None = None,
    sharded: bool = False,
    images: bool = False,
    quantized: bool = False,
) -> PreTrainedModel:
    """Load a causal language model on the CPU: from a local folder, or with random weights of a configuration.

    >>> model = load_model(preset="qwen3-tiny", vocab_size=2048, seed=0)
    >>> model = prepare(load_model("Qwen3-8B", sharded=True), world)

    A configuration that names a class with a head that scores (`architectures`) is loaded as one. With `sharded`,
    parameters have no memory until `prepare` has decided which part this rank keeps; it then reads or draws that part
    on the world's device. With `images`, and for a configuration that no causal model has, a model from images and text
    to text is loaded, for `prepare(model, world, encoder=Layout(…))`. With `quantized`, a folder may have its weights
    in 4 or 8 bits, which are dequantised; `longspan train` with `lora.rank` leaves them as they are.
    With a `path`, `config` is used in place of its config.json. Random weights are a function of the configuration and
    `seed` (and with `sharded` of the kind of device). `vocab_size` is that of the tokenizer: tiny presets get it, and
    other models must have as many rows. Raises ModelError for an unknown preset or dtype, and for a folder that is
    missing, incomplete, damaged or (without `quantized`) quantized, or that holds tensors that the model does not take.
    """
    parameter_dtype = torch_dtype(dtype)
    if config is None and path is None and preset is None:
        raise ModelError(f"give a folder, or a preset: {', '.join(PRESETS)}")
    if config is None and path is None:
        config = preset_config(preset or "", vocab_size=vocab_size)
    elif not isinstance(config, PreTrainedConfig):
        config = read_configuration(Path(config or path or ""))
    source = path or config._name_or_path
    sentence = f"no model can be made of the {type(config).__name__}{f' of {source}' if source else ''}"
    if path is not None:
        # raises for what the folder lacks, before transformers says it in its own words
        weight_files(Path(path), quantized=quantized)
        sentence = f"the model in {path} cannot be loaded"
    architecture = find_score_class(config) or choose_image_text_class(config, images)  # None: a causal model
    with raise_model_error(sentence), no_progress_bars():
        if path is not None:
            model = _load_folder(Path(path), config, parameter_dtype, architecture, sharded=sharded)
        elif sharded:
            model = empty_model(config, parameter_dtype, architecture)
            fill_when_prepared(model, RandomWeights(model, seed))
        else:
            with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
                torch.manual_seed(seed)
                model = new_model(config, torch.float32, architecture)
            # drawn in float32, so that every dtype holds the same numbers, rounded
            set_dtypes(model, parameter_dtype)
            model.config.dtype = parameter_dtype
    vocabulary = vocabulary_size(model)
    if vocab_size is not None and vocabulary is not None and vocab_size > vocabulary:
        raise ModelError(
            f"the tokenizer has {vocab_size} ids, the model in {source or preset or 'the configuration'} only "
            f"{vocabulary}; use the tokenizer that belongs to the model"
        )
    return model


def _load_folder(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, architecture: Any, *, sharded: bool
) -> PreTrainedModel:
    """longspan reads weights in 4 or 8 bits, transformers others. `architecture` None: a causal language model."""
    model = empty_model(config, dtype, architecture)
    if (generation := read_generation_settings(folder)) is not None:
        model.generation_config = generation
    stored: StorageMethod | None = None  # how the folder has weights in 4 or 8 bits
    if settings := quantization_settings(folder):
        from longspan.model.frozen.formats.storage_methods import find_storage_method

        try:
            stored = find_storage_method(settings)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error
    # All files are checked here, as transformers' loader lets faults pass; what it reads below is another model.
    fill_when_prepared(model, checked_folder_weights(folder, model, stored))
    if sharded:
        return model
    if stored is not None:
        fill_now(model)
        return model.eval()
    stock = architecture or AutoModelForCausalLM
    return stock.from_pretrained(folder, config=config, dtype=dtype, **FOLDER_OPTIONS)


def find_score_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class with a head that scores of a configuration whose `architectures` name one; else None."""
    kinds = (kind for name in config.architectures or () for kind in SCORE_HEADS if name.endswith(kind))
    if (kind := next(kinds, None)) is None:
        return None
    from longspan.model.score_heads import score_class

    return score_class(config, kind)


def check_folder_weights(folder: str | Path) -> None:
    """Raise ModelError unless the files of a folder hold its model's weights, whole or in 4 or 8 bits, by the headers
    of the files alone.
    """
    # Reading the folder for training reports what is left out.
    with warnings.catch_warnings(action="ignore"):
        load_model(folder, sharded=True, quantized=True)


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype of parameters, by its name or as it is. Raises ModelError for any other dtype."""
    for name, kind in _DTYPES.items():
        if dtype in (name, kind):
            return kind
    raise ModelError(f"unknown dtype {dtype!r}; use {', '.join(_DTYPES)}")


# ---- whether files hold what a model takes


# Tables that models of today compute: of rotary angles, of positions, and masks of causal attention.
_TABLES = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")


def checked_folder_weights(
    folder: Path, model: PreTrainedModel, stored: "StorageMethod | None" = None
) -> FolderWeights:
    """Return a folder as the source of a model's weights, after its headers are compared with the model's names.

    `stored` says how the folder has weights in 4 or 8 bits. Warns of tensors that the model lacks with reason: tables
    that it computes, depths of multi-token prediction, towers beside a text model. ModelError for other tensors, and
    for weights that are missing, of another shape, quantized, twice in the files, or tied and unequal.
    """
    _refuse_weights_of_other_class(folder, model)
    join = None if stored is None else stored.join_weights
    source = FolderWeights(folder, model, join=join)
    source.check_complete()
    unread = source.unread
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *_TABLES]
    buffers = dict(model.named_buffers())
    left_out = {key for key, name in unread.items() if name in buffers or any(re.search(p, name) for p in patterns)}
    if unread.keys() - left_out:
        from longspan.model.mtp.published_names import select_published_mtp_names

        left_out |= select_published_mtp_names(unread, model.config.get_text_config().num_hidden_layers)
    if unread.keys() - left_out:
        # The folder may be of a larger model, of which this one is the text model: what that one takes is left out.
        whole_config = read_configuration(folder)
        if (image_class := image_text_class_of_architectures(whole_config)) is not None:
            whole = FolderWeights(folder, empty_model(whole_config, torch.float32, image_class), join=join)
            left_out |= unread.keys() - whole.unread.keys()
    if unknown := sorted(unread.keys() - left_out):
        raise ModelError(
            f"the files of {folder} hold {plural(len(unknown), 'tensor')} that a {type(model).__name__} of its "
            f"config.json does not take: {items_text(unknown)}; use the config.json that belongs to the weights, or "
            "take these tensors out of the files"
        )
    if unread:
        warnings.warn(
            f"{folder}: {plural(len(unread), 'tensor')} of its files are no part of the {type(model).__name__} itself, "
            f"which is read without: {items_text(sorted(unread))}",
            stacklevel=2,
        )
    return source


def _refuse_weights_of_other_class(folder: Path, model: PreTrainedModel) -> None:
    """Such weights may have a stock class's names: transformers would load them, and compute something else."""
    names = model.config.architectures or []
    stock = type(model).__name__
    if names and not any(name.lower() == stock.lower() or hasattr(transformers, name) for name in names):
        raise ModelError(
            f"the weights of {folder} are of {names[0]}, which transformers does not have, and would be read as those "
            f"of a {stock}: read the folder with {names[0]}.from_pretrained, register the class under a model_type of "
            f'its own, or write "architectures": ["{stock}"] into its config.json if it is one'
        )

"""Models from a local Hugging Face folder, a configuration or a preset; nothing is downloaded.

How models are saved is in `save.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from longspan.errors import ModelError
from longspan.model.prepared import vocabulary_size
from longspan.model.presets import PRESETS, preset_config
from longspan.model.weights.fill import empty_model, fill_when_prepared, images_class
from longspan.model.weights.folder import FolderWeights
from longspan.model.weights.hf_folder import (
    FOLDER_OPTIONS,
    OWN_MODEL,
    no_progress_bars,
    read_configuration,
    refusal_reason,
    weight_files,
)
from longspan.model.weights.random import RandomWeights

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str | Path | None = None,
    preset: str | None = None,
    *,
    config: PreTrainedConfig | str | Path | None = None,
    dtype: str | torch.dtype = "float32",
    seed: int = 0,
    vocab_size: int | None = None,
    sharded: bool | None = False,
    images: bool = False,
) -> PreTrainedModel:
    """Load a causal language model on the CPU: from a local folder, or with random weights of a configuration.

    >>> model = load_model(preset="qwen3-tiny", vocab_size=2048, seed=0)
    >>> model = prepare(load_model("Qwen3-8B", sharded=True), world)
    >>> model = prepare(load_model(config="Qwen3-8B/config.json", sharded=True), world)

    With `sharded`, parameters have no memory until `prepare` has decided which part this rank keeps; it then reads that
    part from the folder's safetensors files, or draws it, on the world's device, so that no rank ever holds the whole.
    None: sharded if the folder's files are safetensors, which can be read in parts, and for random weights.

    With `images`, and for a configuration that no causal language model has, a model from images and text to text is
    loaded (AutoModelForImageTextToText): give it to `prepare(model, world, encoder=Layout(…))`.

    With a `path`, `config` is used in place of the folder's config.json. Random weights are a function of the
    configuration and `seed` only: the same on every rank, whatever the world (and, with `sharded`, of the kind of
    device that draws them). `vocab_size` is that of the tokenizer: a preset of tiny sizes gets it, any other model must
    have as many rows. Raises ModelError for an unknown preset or dtype, and for a folder that is missing, incomplete
    or damaged.
    """
    kind = torch_dtype(dtype)
    if path is not None:
        folder = Path(path)
        other_config = read_configuration(Path(config)) if isinstance(config, str | Path) else config
        sharded = weight_files(folder)[0].suffix == ".safetensors" if sharded is None else sharded
        image_class = images_class(other_config or read_configuration(folder), images)
        read = _prepare_to_read if sharded else _read_model
        model = read(folder, other_config, kind, image_class)
        return _check_embedding_rows(model, path, vocab_size)
    if config is None:
        config = _find_preset(preset, vocab_size)
    elif not isinstance(config, PreTrainedConfig):
        config = read_configuration(Path(config))
    draw = _draw_model if sharded is False else _prepare_to_draw
    model = draw(config, kind, seed, images_class(config, images))
    return _check_embedding_rows(model, config._name_or_path or preset or "the configuration", vocab_size)


def _check_embedding_rows(model: PreTrainedModel, path: str | Path, vocab_size: int | None) -> PreTrainedModel:
    """Return the model. Raises ModelError if the tokenizer has more ids than its embedding has rows."""
    vocabulary = vocabulary_size(model)
    if vocab_size is not None and vocabulary is not None and vocab_size > vocabulary:
        raise ModelError(
            f"the tokenizer has {vocab_size} ids, the model in {path} only {vocabulary}; "
            "use the tokenizer that belongs to the model"
        )
    return model


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype of parameters, by its name or as it is. Raises ModelError for any other dtype."""
    for name, kind in _DTYPES.items():
        if dtype in (name, kind):
            return kind
    raise ModelError(f"unknown dtype {dtype!r}; use {', '.join(_DTYPES)}")


def _find_preset(preset: str | None, vocab_size: int | None) -> PreTrainedConfig:
    """Return a preset's configuration. Raises ModelError if `load_model` got neither a folder nor a preset."""
    if preset is None:
        raise ModelError(f"give a folder, or a preset: {', '.join(PRESETS)}")
    return preset_config(preset, vocab_size=vocab_size)


def _draw_model(config: PreTrainedConfig, dtype: torch.dtype, seed: int, image_class: Any) -> PreTrainedModel:
    """Draw a model on the CPU; `image_class` is its class from images and text to text, None for a causal model."""
    automatic = AutoModelForCausalLM if image_class is None else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _name_configuration_in_errors(config):
            model = automatic.from_config(deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    for parameter in model.parameters():  # drawn in float32, so that every dtype holds the same numbers, rounded
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _prepare_to_draw(config: PreTrainedConfig, dtype: torch.dtype, seed: int, image_class: Any) -> PreTrainedModel:
    """Make a model without memory for its parameters, which `prepare` will draw; `image_class` as for `_draw_model`."""
    with _name_configuration_in_errors(config):
        model = empty_model(config, dtype, image_class)
    fill_when_prepared(model, RandomWeights(model, seed))
    return model


@contextmanager
def _name_configuration_in_errors(config: PreTrainedConfig) -> Iterator[None]:
    """Turn what a model's class raises when it is made into a ModelError that names the configuration."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # whatever a class makes of its sizes
        name = f"{type(config).__name__}{f' of {path}' if (path := config._name_or_path) else ''}"
        raise ModelError(f"no model can be made of the {name}: {refusal_reason(error, OWN_MODEL)}") from error


def _read_model(folder: Path, config: PreTrainedConfig | None, dtype: torch.dtype, image_class: Any) -> PreTrainedModel:
    """Read a folder's model; `image_class` as for `_draw_model`.

    Raises ModelError if it cannot be loaded, or if weights are missing.
    """
    weight_files(folder)  # raises a ModelError of its own for what is missing
    automatic = AutoModelForCausalLM if image_class is None else AutoModelForImageTextToText
    config = config or read_configuration(folder)
    try:
        with no_progress_bars():
            loaded: Any = automatic.from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True, **FOLDER_OPTIONS
            )
    except Exception as error:  # json, safetensors, torch, huggingface_hub and transformers each raise their own
        raise ModelError(f"the model in {folder} cannot be loaded: {refusal_reason(error, OWN_MODEL)}") from error
    model, loading_info = loaded
    if absent := sorted(loading_info["missing_keys"]):
        raise ModelError(
            f"the model in {folder} lacks {len(absent)} weights that its config.json asks for, which would be random: "
            f"{', '.join(absent[:4])}; complete the folder, or correct config.json"
        )
    return model


def _prepare_to_read(
    folder: Path, config: PreTrainedConfig | None, dtype: torch.dtype, image_class: Any
) -> PreTrainedModel:
    """Make a folder's model without memory for its parameters, which `prepare` will read from its files.

    Raises ModelError for files that cannot be read in parts, and a model that cannot be made.
    """
    files = weight_files(folder)
    if files[0].suffix != ".safetensors":
        raise ModelError(
            f"{folder} has {files[0].name}, of which no part can be read alone; save the model again with "
            "save_pretrained of transformers, which writes safetensors, or load it with sharded=False"
        )
    config = config or read_configuration(folder)
    try:
        model = empty_model(config, dtype, image_class)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # json, huggingface_hub and transformers each raise their own
        raise ModelError(f"the model in {folder} cannot be loaded: {refusal_reason(error, OWN_MODEL)}") from error
    fill_when_prepared(model, FolderWeights(folder, files, model))
    return model

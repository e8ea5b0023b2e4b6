"""The configuration that `longspan doctor --model` names."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from longspan.errors import ConfigError, import_object
from longspan.hub import find_local_path
from longspan.model.weights.hf_folder import read_configuration


def find_configuration(name: str) -> PreTrainedConfig:
    """Find the configuration of a local folder (or its config.json), or the default one of a class or a model_type.

    >>> find_configuration("Qwen3ForCausalLM").model_type, find_configuration("qwen3").model_type
    ('qwen3', 'qwen3')

    A dotted class is one of another package, with a `config_class`; it is registered with transformers, which would not
    find it by itself. Raises ConfigError for an unknown name, with near ones, for a class that is neither the causal
    language model of its configuration nor that from images and text to text, and for a configuration without either;
    ModelError for a folder that cannot be read.
    """
    path = Path(find_local_path(name, "--model"))
    architecture = None
    if path.exists() or "/" in name:
        config = read_configuration(path)
    elif name in CONFIG_MAPPING:
        config = default_configuration(CONFIG_MAPPING[name])
    else:
        named_class: Any = getattr(transformers, name, None)
        if "." in name:
            named_class = import_object(name, f"--model is {name}")
        if isinstance(named_class, type) and issubclass(named_class, PreTrainedConfig):
            config = default_configuration(named_class)
        elif isinstance(named_class, type) and getattr(named_class, "config_class", None) is not None:
            architecture = named_class
            config = default_configuration(named_class.config_class)
            register_class(config, architecture if "." in name else None)
        else:
            raise ConfigError(
                f"there is no folder, class of transformers or model_type {name!r}; {_suggest_names(name)}"
            )
    mappings: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    classes = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    if not classes:
        raise ConfigError(
            f"{name}: transformers has no causal language model for {type(config).__name__}, nor one from images and "
            f"text to text; {_suggest_names(name)}"
        )
    if architecture is not None and architecture not in classes:
        kind = type(config).__name__
        advice = f"use --model {classes[0].__name__}"
        if "." in name:
            advice = f"give it a config_class of its own: a subclass of {kind} with another model_type"
        raise ConfigError(f"{name} is not the language model of {kind}, which is {classes[0].__name__}; {advice}")
    return config


def default_configuration(config_class: Any) -> PreTrainedConfig:
    """Make the default configuration of a class, with a tower where only the default lacks one (Gemma 4)."""
    config = config_class()
    if getattr(config, "vision_config", True) is None and "vision_config" in config_class.sub_configs:
        return config_class(vision_config={})
    return config


def reads_images(config: PreTrainedConfig) -> bool:
    """Return whether transformers has a model of this configuration from images and text to text."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def register_class(config: PreTrainedConfig, architecture: type | None) -> None:
    """Let transformers make this class for its configuration, unless it has a class for that; None: change nothing."""
    if architecture is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        AutoModelForCausalLM.register(type(config), architecture)  # pyright: ignore[reportArgumentType]


def _suggest_names(name: str) -> str:
    types = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    by_word = {word.lower(): word for word in sorted({*types, *map(str, types.values())})}
    matches = get_close_matches(name.rpartition(".")[2].lower(), list(by_word), n=4, cutoff=0.6)
    names = f"did you mean {', '.join(by_word[word] for word in matches)}? " if matches else ""
    return (
        f"{names}Give a folder with a config.json, a class such as Qwen3ForCausalLM, or a model_type such as qwen3"
    )

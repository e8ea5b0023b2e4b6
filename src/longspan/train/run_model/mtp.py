"""The depths of multi-token prediction of a run's model, by [mtp] of its configuration."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from longspan.config.keys import AUTO
from longspan.config.sections import RANDOM, RunConfig
from longspan.errors import ModelError, plural
from longspan.model.add_depths import add_mtp
from longspan.model.mtp.published_names import count_depths


def add_configured_mtp(config: RunConfig, model: PreTrainedModel, *, read: bool = True) -> PreTrainedModel:
    """Add the depths of [mtp] to the model, in place, if there are any; without `read` their weights come from a
    checkpoint.

    Returns the model. Raises ModelError for a model that cannot have them, and for a folder without their weights.
    """
    if not config.mtp.num_layers:
        return model
    folder = find_depth_weights(config, model.config) if read else None
    return add_mtp(model, config.mtp.num_layers, weights=folder, seed=config.train.seed)


def find_depth_weights(config: RunConfig, configuration: Any) -> Path | None:
    """Find the folder that the depths' weights are read from; None if they are drawn.

    With mtp.weights "auto" it is model.path if that has any. Raises ModelError for a folder with fewer
    than mtp.num_layers.
    """
    weights_path = config.mtp.weights
    folder = config.model.path if weights_path == AUTO else "" if weights_path == RANDOM else weights_path
    if not folder:
        return None
    available = count_depths(Path(folder), configuration.get_text_config().num_hidden_layers)
    depths = config.mtp.num_layers
    if available >= depths:
        return Path(folder)
    if weights_path == AUTO and not available:
        return None
    raise ModelError(
        f"mtp.num_layers is {depths}, and {folder} has weights of {plural(available, 'depth')} of multi-token "
        "prediction; set "
        + (f"mtp.num_layers = {available}, or " if available else "")
        + f'mtp.weights = "{RANDOM}" to begin with random ones'
    )


def depths_line(config: RunConfig, configuration: Any) -> str:
    """Return the line of a run's log about its depths: how many, whose weights, and what is trained of them."""
    folder = find_depth_weights(config, configuration)
    source = f"weights of {folder}" if folder else f"random weights (train.seed {config.train.seed})"
    adapter_note = ", which stay as they are beside their adapters" if config.lora.rank else ""
    adapter_note = ", trained whole beside the model's adapter" if config.mtp.train_whole else adapter_note
    return f"multi-token prediction: {plural(config.mtp.num_layers, 'depth')}, {source}{adapter_note}"

"""The depths of multi-token prediction that [mtp] names, given to a run's model before it is prepared."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from longspan.config.keys import AUTO
from longspan.config.model_sections import RANDOM
from longspan.config.sections import RunConfig
from longspan.errors import ModelError, counted
from longspan.model.add_depths import add_mtp
from longspan.model.mtp.names import count_depths


def with_depths(config: RunConfig, model: PreTrainedModel, *, read: bool = True) -> PreTrainedModel:
    """The model with the depths of [mtp], if there are any; without `read` their weights come from a checkpoint.

    Raises ModelError for a model that cannot have them, and for a folder without their weights.
    """
    if not config.mtp.depths:
        return model
    folder = depth_weights(config, model.config) if read else None
    return add_mtp(model, config.mtp.depths, weights=folder, seed=config.train.seed)


def depth_weights(config: RunConfig, configuration: Any) -> Path | None:
    """The folder that the depths' weights are read from; None where they are drawn.

    Raises ModelError for one that has fewer depths than mtp.depths; model.path, unless it is named, may have none.
    """
    named = config.mtp.weights
    folder = config.model.path if named == AUTO else "" if named == RANDOM else named
    if not folder:
        return None
    there, asked = count_depths(Path(folder), configuration.get_text_config().num_hidden_layers), config.mtp.depths
    if there >= asked:
        return Path(folder)
    if named == AUTO and not there:
        return None
    raise ModelError(
        f"mtp.depths is {asked}, and {folder} has weights of {counted(there, 'depth')} of multi-token prediction; set "
        + (f"mtp.depths = {there}, or " if there else "")
        + f'mtp.weights = "{RANDOM}" to begin with random ones'
    )


def depths_line(config: RunConfig, configuration: Any) -> str:
    """Where the depths' weights come from, for the log of a run that begins."""
    folder = depth_weights(config, configuration)
    source = f"weights of {folder}" if folder else f"random weights (train.seed {config.train.seed})"
    frozen = ", which stay as they are beside their adapters" if config.lora.rank else ""
    frozen = ", trained whole beside the model's adapter" if config.mtp.train_whole else frozen
    return f"multi-token prediction: {counted(config.mtp.depths, 'depth')}, {source}{frozen}"

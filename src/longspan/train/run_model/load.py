"""The model of a run before `prepare`: its configuration, its weights, and what is added: an adapter, depths."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from longspan.config.keys import AUTO
from longspan.config.sections import RANDOM, RunConfig
from longspan.errors import ModelError, plural
from longspan.hub import hub_name
from longspan.model import PRESETS, load_model, preset_config
from longspan.model.add_depths import add_mtp
from longspan.model.kinds import SCORE_HEADS
from longspan.model.layers import MTP
from longspan.model.mtp.published_names import count_depths
from longspan.model.weights.fill import defer_to_checkpoint
from longspan.model.weights.hf_folder import read_configuration


def read_model_configuration(config: RunConfig, vocabulary: int) -> PreTrainedConfig:
    """Read the architecture that [model] names; a tiny preset has an embedding of `vocabulary` ids.

    With `model.num_labels` it is that of the family's class with a head that scores. Raises ModelError for a folder
    whose head has another number of scores.
    """
    source = config.model.source
    labels = config.model.num_labels
    if source:
        configuration = read_configuration(Path(source))
    else:
        configuration = preset_config(config.model.preset_name, vocab_size=vocabulary)
    name = next((name for name in configuration.architectures or () if name.endswith(SCORE_HEADS)), None)
    sequence_head, token_head = SCORE_HEADS
    if name is not None and (name.endswith(token_head) or labels != configuration.num_labels):
        raise ModelError(
            f"{source} holds a {name} of {plural(configuration.num_labels or 0, 'score')}, and model.num_labels is "
            f"{labels}; give a …{sequence_head} of as many, as rows of a run have labels of documents, or are pairs"
        )
    if labels and name is None:
        from longspan.model.score_heads import score_class

        architecture = score_class(configuration).__name__
        configuration.num_labels = labels
        configuration.architectures = [architecture]
    return configuration


def load_run_model(config: RunConfig, configuration: PreTrainedConfig, *, images: bool = False) -> PreTrainedModel:
    """Load the model that [model] names, with the depths of [mtp] and, with `images`, its towers; not yet prepared.

    Weights are read or drawn once it is prepared, except those of tiny presets, which are drawn here.
    """
    model = config.model
    seed = config.train.seed
    # A tiny preset has no vocabulary of its own.
    is_tiny = model.preset_name and not PRESETS[model.preset_name].embedding_rows
    options: dict[str, Any] = {"dtype": model.dtype, "seed": seed, "sharded": not is_tiny, "images": images}
    options["quantized"] = config.lora.rank > 0  # full training would move weights that were rounded to a few bits
    if model.num_labels and model.path:
        architectures = read_configuration(Path(model.path)).architectures
        if architectures != configuration.architectures:  # a language model, which gets a new head
            from longspan.model.score_heads import add_score_head

            language_configuration = deepcopy(configuration)
            language_configuration.architectures = architectures
            return add_score_head(
                load_model(model.path, config=language_configuration, **options), model.num_labels, seed=seed
            )
    return add_configured_mtp(config, load_model(model.path or None, config=configuration, **options))


def make_model_without_weights(
    config: RunConfig, configuration: PreTrainedConfig, *, images: bool = False
) -> PreTrainedModel:
    """Make a model of this configuration without weights: once it is prepared, a checkpoint fills them in."""
    model = load_model(config=configuration, dtype=config.model.dtype, sharded=True, images=images)
    add_configured_mtp(config, model, read=False)
    defer_to_checkpoint(model)
    return model


def add_configured_adapter(config: RunConfig, model: PreTrainedModel) -> Any:
    """Add the new adapter that [lora] describes to the model, in place; return the PeftModel around it.

    All weights but the adapter's are frozen. Raises ModelError as `add_lora`.
    """
    from longspan.model.adapters.new_adapter import NewAdapter, add_lora

    lora = config.lora
    base = ""  # the model's name on the hub, or its folder; they are saved with the adapter
    revision = ""
    if config.model.path:
        folder = Path(config.model.path).resolve()
        base = str(folder)
        if name := hub_name(folder):
            base = name
            revision = folder.name
    adapter = NewAdapter(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        targets=lora.target_modules,
        whole=(MTP,) if config.mtp.train_whole else (),  # the depths of multi-token prediction, without adapters
        seed=config.train.seed,
        base=base,
        revision=revision,
    )
    return add_lora(model, adapter)


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
    if config.mtp.weights == RANDOM:
        return None
    is_auto = config.mtp.weights == AUTO
    folder = config.model.path if is_auto else config.mtp.weights
    if not folder:
        return None
    available = count_depths(Path(folder), configuration.get_text_config().num_hidden_layers)
    depths = config.mtp.num_layers
    if available >= depths:
        return Path(folder)
    if is_auto and not available:
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
    adapter_note = ""
    if config.mtp.train_whole:
        adapter_note = ", trained whole beside the model's adapter"
    elif config.lora.rank:
        adapter_note = ", which stay as they are beside their adapters"
    return f"multi-token prediction: {plural(config.mtp.num_layers, 'depth')}, {source}{adapter_note}"

"""Saved weights as a model: its configuration, what is checked before it is made, and the prepared model itself."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from longspan.checkpoint.checkpoint import check_checkpoint, find_checkpoint, holds_encoders, load_checkpoint
from longspan.checkpoint.files import read_state
from longspan.checkpoint.store_path import checkpoints_root
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, first_rank_warns, run_on_every_rank, run_on_first_rank
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer
from longspan.corpus.tokenizer_folder import vocabulary_files
from longspan.errors import CheckpointError, ConfigError, DataError, ModelError
from longspan.evaluation.saved.request import Subject
from longspan.model import load_model
from longspan.model.load import check_folder
from longspan.model.seams.rope import position_limit, smallest_factor
from longspan.model.weights.hf_folder import read_configuration
from longspan.train.long_documents import scale_positions
from longspan.train.training import AnyModel, load_run_model, model_configuration, prepare_run_model, unread_model


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that are there: of this checkpoint (None: of the folder), with this configuration and tokenizer."""

    subject: Subject
    checkpoint: Path | None
    configuration: PreTrainedConfig
    tokenizer: TextTokenizer


def check_saved_weights(subject: Subject, tokenizer: str, world: World, log: LogLine) -> CheckedWeights:
    """Find the weights of a subject, their configuration and their tokenizer; entered by all ranks.

    `tokenizer` is the folder of another tokenizer to use; "": that of the weights.
    Raises CheckpointError, ModelError or DataError, on every rank, for what is missing, damaged or does not match.
    """
    weights, checkpoint = subject.weights, subject.weights.checkpoint
    if weights.run_dir is None:
        run_on_every_rank(world, lambda: check_folder(weights.path), ModelError)
    elif checkpoint is not None:
        check_checkpoint(checkpoint, world)
    else:
        checkpoint = find_checkpoint(checkpoints_root(weights.run_dir, subject.config.run.checkpoints), world, log)
        if checkpoint is None:
            raise CheckpointError(
                f"{weights.run_dir} has no checkpoint; train it first: longspan train {weights.run_dir}/config.toml"
            )
    configuration = run_on_every_rank(world, lambda: _read_subject_configuration(subject), ModelError)
    loaded = run_on_every_rank(world, lambda: _read_tokenizer(subject, tokenizer, configuration), ModelError)
    return CheckedWeights(subject, checkpoint, configuration, loaded)


def _read_subject_configuration(subject: Subject) -> PreTrainedConfig:
    run_dir = subject.weights.run_dir
    if run_dir is not None and not (run_dir / "config.json").is_file():
        raise CheckpointError(
            f"{run_dir} has no config.json, which names the class and sizes of its model; a run writes it when it "
            f"begins: longspan train {run_dir}/config.toml"
        )
    return read_configuration(subject.folder)


def _read_tokenizer(subject: Subject, tokenizer_folder: str, configuration: PreTrainedConfig) -> TextTokenizer:
    folder = Path(tokenizer_folder) if tokenizer_folder else subject.folder
    if not vocabulary_files(folder):
        raise DataError(
            f"no tokenizer.json in {folder}; name the folder of the model's tokenizer with --tokenizer, or put its "
            "files there"
        )
    tokenizer = load_tokenizer(folder).set_parsing(subject.config.data.parse_special_tokens)
    rows = configuration.get_text_config().vocab_size
    check_vocabulary(tokenizer.own_size, rows, tokenizer=str(folder), model=str(subject.weights.path))
    return tokenizer


def fit_positions(
    checked: CheckedWeights, longest: int, origin: str, *, scaled: bool, log: LogLine
) -> PreTrainedConfig:
    """Fit the configuration to a longest document of `longest` tokens, from source `origin`.

    `scaled`: flags gave a scaling of positions, which takes the place of the one that the model was trained with.
    Raises ConfigError for a document beyond the model's positions, with what lengthens the model, and the flag
    that cuts documents.
    """
    settings, configuration = checked.subject.config.model, checked.configuration
    if scaled:
        unscaled = model_configuration(checked.subject.config, configuration.get_text_config().vocab_size)
        return scale_positions(unscaled, settings, longest, origin, log, cut_by="--max-document-tokens")
    limit = position_limit(configuration)
    if limit is None or longest <= limit:
        return configuration
    raise ConfigError(
        f"the longest document has {longest} tokens ({origin}), and the model in {checked.subject.weights.path} knows "
        f"{limit} positions; {_advise_positions(checked, longest)}, or cut documents with --max-document-tokens {limit}"
    )


def _advise_positions(checked: CheckedWeights, longest: int) -> str:
    parameters: Any = getattr(checked.configuration, "rope_parameters", None) or {}
    rope_type, factor = parameters.get("rope_type", "default"), parameters.get("factor") or 1.0
    new_factor = smallest_factor(checked.configuration, longest)
    if rope_type == "default":
        return f"lengthen it with --model.rope_scaling yarn (a factor of {new_factor:g})"
    if checked.subject.config.model.rope_scaling:
        return (
            f"lengthen it with --model.rope_scaling {rope_type} --model.rope_factor {factor * new_factor:g} "
            f"(now {factor:g})"
        )
    return f"raise the factor of {rope_type} in its config.json from {factor:g} to {factor * new_factor:g}"


def load_saved_model(
    checked: CheckedWeights, config: RunConfig, configuration: PreTrainedConfig, world: World, *, images: bool = False
) -> tuple[AnyModel, int]:
    """Load the prepared model with the weights; returns the model, and the steps that trained it (0 for a folder).

    The model has a tower and a projector with `images`, and where its checkpoint has these. `config` has the home's
    [parallel] and the plans' [context]. Raises ConfigError where a GPU has no room for the model.
    """
    checkpoint = checked.checkpoint
    if checkpoint is None:
        load = partial(load_model, checked.subject.weights.path, dtype=config.model.dtype, sharded=True)
        with first_rank_warns(world):
            model = run_on_every_rank(world, lambda: load(config=configuration, images=images), ModelError)
        return prepare_run_model(config, world, model, training=False, images=images), 0
    images = run_on_first_rank(world, lambda: _look_for_encoders(checkpoint, needed=images), CheckpointError)
    state = run_on_first_rank(world, lambda: read_state(checkpoint), CheckpointError)
    adapts = bool(state.get("config", {}).get("lora", {}).get("rank"))  # then the checkpoint has only the adapter
    load = partial(load_run_model, vocabulary=configuration.get_text_config().vocab_size) if adapts else unread_model
    model = run_on_every_rank(world, lambda: load(config, configuration=configuration, images=images), ModelError)
    prepared = prepare_run_model(config, world, model, training=False, images=images)
    if not adapts or config.lora.rank:  # without its adapter a model is the base model, which `prepare` has read
        load_checkpoint(checkpoint, prepared, None, world)
    return prepared, int(state["step"])


def _look_for_encoders(checkpoint: Path, *, needed: bool) -> bool:
    encoders = holds_encoders(checkpoint)
    if needed and not encoders:
        raise CheckpointError(
            f"the documents have images, and checkpoint {checkpoint} is of a language model alone, trained without; "
            "evaluate it on text, or its base model's folder on these documents"
        )
    return encoders

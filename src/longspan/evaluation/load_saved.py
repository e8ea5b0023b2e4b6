"""Saved weights found and checked, and a prepared model loaded with them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig

from longspan.checkpoint.base import check_base_unchanged
from longspan.checkpoint.best import RunCheckpoints
from longspan.checkpoint.checkpoint import check_checkpoint, load_checkpoint
from longspan.checkpoint.files import read_state
from longspan.checkpoint.storage import read_metadata
from longspan.comm import World
from longspan.comm.all_ranks import (
    LogLine,
    is_first_rank,
    run_on_every_rank,
    run_on_first_rank,
    silence_warnings_of_other_ranks,
)
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer
from longspan.errors import CheckpointError, ConfigError, DataError, ModelError
from longspan.evaluation.request import Subject
from longspan.model import load_model
from longspan.model.load import check_folder_weights
from longspan.model.multimodal.multimodal_model import are_multimodal
from longspan.model.weights.hf_folder import quantization_settings, read_configuration
from longspan.model.weights.tokenizer_files import vocabulary_files
from longspan.train.run_model.load import load_run_model, make_model_without_weights
from longspan.train.run_model.prepare import AnyModel, prepare_run_model


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that are there: of this checkpoint (None: of the folder), with this configuration and tokenizer."""

    subject: Subject
    checkpoint: Path | None
    configuration: PreTrainedConfig
    tokenizer: TextTokenizer


def find_checked_weights(subject: Subject, tokenizer: str, world: World, log: LogLine) -> CheckedWeights:
    """Find the weights of a subject, their configuration and their tokenizer (or that of the folder `tokenizer`).

    Entered by all ranks, which raise the same errors. No weight is read.
    """
    weights = subject.weights
    checkpoint = weights.checkpoint
    if weights.run_dir is None:
        run_on_every_rank(world, lambda: check_folder_weights(weights.path), ModelError)
        if method := quantization_settings(weights.path).get("quant_method"):
            log(
                f"{weights.path} holds its weights in {method}: they are dequantised to {subject.config.model.dtype}"
            )
    elif checkpoint is not None:
        check_checkpoint(checkpoint, world)
    else:
        find = partial(RunCheckpoints.find, weights.run_dir, log)
        checkpoints = run_on_first_rank(world, find, CheckpointError)
        # No weights are taken from a checkpoint for its base.
        first_log = log if is_first_rank(world) and not weights.base else lambda _: None
        checkpoint = checkpoints.take(partial(check_checkpoint, world=world), first_log)
    if weights.run_dir is not None:
        # The configuration is that of training: a flag may scale positions otherwise.
        trained = run_on_every_rank(world, partial(load_config, weights.run_dir / "config.toml"), ConfigError)
        check = partial(check_base_unchanged, weights.run_dir, trained, world.device.type)
        run_on_first_rank(world, check, ModelError)
    configuration = run_on_every_rank(world, lambda: read_configuration(subject.folder), ModelError)
    loaded = run_on_every_rank(world, lambda: _read_tokenizer(subject, tokenizer, configuration), ModelError)
    return CheckedWeights(subject, checkpoint, configuration, loaded)


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


def load_saved_model(
    checked: CheckedWeights,
    config: RunConfig,
    configuration: PreTrainedConfig,
    world: World,
    *,
    images: bool = False,
) -> tuple[AnyModel, int]:
    """Load the prepared model with the weights; return the model, and the steps that trained it (0 for a folder, and
    for the weights that a run began with, which for an adapter have it as it began).

    `configuration` is the model's, with positions that may have been scaled. Entered by all ranks. Raises
    CheckpointError for documents with images and a checkpoint without encoders.
    """
    checkpoint = checked.checkpoint
    if checkpoint is None:
        path = checked.subject.weights.path
        load = partial(load_model, path, dtype=config.model.dtype, sharded=True, quantized=True)
        with silence_warnings_of_other_ranks(world):
            model = run_on_every_rank(world, lambda: load(config=configuration, images=images), ModelError)
        return prepare_run_model(config, world, model, training=False, images=images), 0

    def has_encoders() -> bool:
        """Return whether the checkpoint has weights of encoders, by their names. Raises CheckpointError if it has none
        and the documents have images.
        """
        saved_names = read_metadata(checkpoint).state_dict_metadata
        weights = [name.removeprefix("model.") for name in saved_names if name.startswith("model.")]
        encoders = are_multimodal(weights) or any(name.startswith("encoders.") for name in weights)
        if images and not encoders:
            raise CheckpointError(
                f"the documents have images, and checkpoint {checkpoint} is of a language model alone, trained without "
                "any; evaluate it on text, or its base model's folder on these documents"
            )
        return encoders

    encoders = run_on_first_rank(world, has_encoders, CheckpointError)
    state = run_on_first_rank(world, lambda: read_state(checkpoint), CheckpointError)
    # A run with an adapter saves the adapter alone: its base model's weights are read from their own folder.
    base = checked.subject.weights.base
    make_model = load_run_model if config.lora.rank or base else make_model_without_weights
    model = run_on_every_rank(
        world, lambda: make_model(config, configuration=configuration, images=encoders), ModelError
    )
    prepared = prepare_run_model(config, world, model, training=False, images=encoders)
    if base:
        return prepared, 0
    load_checkpoint(checkpoint, prepared, None, world)
    return prepared, int(state["step"])

"""The model of a run: its configuration fitted to the documents, its files in the run's folder, loaded and prepared."""

import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, first_rank_warns, run_on_every_rank, run_on_first_rank
from longspan.config.sections import LoraSection, ModelConfig, RunConfig
from longspan.corpus.build import check_largest_id
from longspan.corpus.tokenizer import copy_generation_settings
from longspan.data.documents import CorpusDocuments
from longspan.errors import ModelError, RunFolderError
from longspan.model.adapters import is_adapted
from longspan.model.load import torch_dtype
from longspan.model.multimodal.multimodal_model import find_language_model
from longspan.model.parts import is_tied
from longspan.model.seams.call_rules import refuse_randomness
from longspan.model.weights.fill import empty_model, images_class
from longspan.model.weights.hf_folder import no_progress_bars
from longspan.run.checks import check_image_keys
from longspan.run.run_data import RunData
from longspan.train.long_documents import scale_positions
from longspan.train.terms.mtp import add_configured_depths, depths_line
from longspan.train.training import (
    AnyModel,
    add_configured_adapter,
    load_run_model,
    model_configuration,
    prepare_run_model,
    unread_model,
)

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan


def keep_model_files(
    directory: Path, settings: ModelConfig, configuration: PreTrainedConfig, architecture: str, log: LogLine
) -> None:
    """Write config.json, as the run trains the model (rope scaling included), and generation_config.json into a folder.

    config.json names the dtype that the weights of model/ are saved in, that of the source if it names one; a line of
    the log says if it is another than that of the parameters.
    """
    source, config, dtype = Path(settings.source), deepcopy(configuration), torch_dtype(settings.dtype)
    if settings.source and isinstance(named := configuration.dtype, torch.dtype) and named.is_floating_point:
        dtype = named
    config.architectures, config.dtype = [architecture], dtype
    with no_progress_bars():
        config.save_pretrained(directory)
    # model.config may name a file: generation_config.json is looked for beside it; a preset has none
    copy_generation_settings((source.parent if source.is_file() else source) if settings.source else None, directory)
    if dtype != torch_dtype(settings.dtype):
        log(
            f"model/ will be saved in {str(dtype).removeprefix('torch.')}, the dtype of {source}; parameters and "
            f"checkpoints are {settings.dtype}, which longspan export --dtype {settings.dtype} keeps"
        )


def check_adapter_targets(config: RunConfig, world: World, log: LogLine) -> None:
    """Raise ModelError on every rank if [lora] names targets or parts that the model does not have. Reads no weights.

    A line says where the adapter will not be merged. A model whose towers are read only for a corpus with images is
    left to `set_up_model`.
    """
    if not config.lora.rank or (not config.lora.targets and config.lora.parts == LoraSection().parts):
        return  # the defaults, all linears of the language model, fit every model

    def check() -> bool:
        """Make an empty model with its depths and adapter; return whether it adapts a weight that is tied."""
        configuration = model_configuration(config, config.data.vocab_size)
        architecture = images_class(configuration, images=False)
        # None with a vision_config: whether the model has towers depends on the corpus, which is not read yet
        if architecture is None and hasattr(configuration, "vision_config"):
            return False
        model = empty_model(configuration, torch.float32, architecture)
        with warnings.catch_warnings(action="ignore"):  # about parts left out, which the run logs later
            add_configured_adapter(config, add_configured_depths(config, model, read=False))
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        return is_tied(model) and any(map(is_adapted, ends))

    if run_on_first_rank(world, check, ModelError):
        log(
            "lora.targets adapt an embedding that is the weight of the head as well (tie_word_embeddings): longspan "
            "export writes the adapter, and refuses --merge"
        )


def set_up_model(
    data: RunData,
    config: RunConfig,
    configuration: PreTrainedConfig,
    memory: "MemoryPlan | None",
    world: World,
    log: LogLine,
    *,
    resumed: bool,
) -> AnyModel:
    """Load the run's model with a configuration that fits its data, keep its files, and prepare it.

    A run that is `resumed` reads and draws no weights, because its checkpoint has them all; under [lora] the checkpoint
    has only the adapter, and the base model is read. Layers keep what a plan of memory chose, if there is one.
    """
    if config.mtp.depths and not resumed:
        log(run_on_every_rank(world, lambda: depths_line(config, configuration), ModelError))
    images = data.images > 0
    check_image_keys(config, data.images)

    def load() -> Any:
        if resumed and not config.lora.rank:
            return unread_model(config, configuration=configuration, images=images)
        vocabulary = _corpus_vocabulary_size(data, config)
        return load_run_model(config, configuration=configuration, vocabulary=vocabulary, images=images)

    with first_rank_warns(world):
        model = run_on_every_rank(world, load, ModelError)
    run_dir, architecture = Path(config.run.dir), type(model).__name__
    keep = partial(keep_model_files, run_dir, config.model, configuration, architecture, log)
    run_on_first_rank(world, keep, RunFolderError)
    prepared = prepare_run_model(config, world, model, memory=memory, images=images)
    refuse_randomness(find_language_model(prepared))
    return prepared


def _corpus_vocabulary_size(data: RunData, config: RunConfig) -> int:
    return data.tokenizer_size if config.data.tokenizer else config.data.vocab_size


def fit_configuration(data: RunData, config: RunConfig, world: World, log: LogLine) -> Any:
    """Return the model's configuration for this vocabulary and the longest document.

    Raises ConfigError if the tokenizer does not fit, or the longest document has more tokens than there are positions.
    """
    vocabulary = _corpus_vocabulary_size(data, config)
    configuration = run_on_every_rank(world, lambda: model_configuration(config, vocabulary), ModelError)
    for corpus in (data.corpus, *(s.documents.corpus for s in data.sets if isinstance(s.documents, CorpusDocuments))):
        check_largest_id(corpus, configuration, config.model.source or config.model.preset_name)
    return scale_positions(configuration, config.model, *data.longest, log)

"""`set_up`: open the data and the model of a configuration, resume from a checkpoint, resolve "auto" values.

All checks that need the data or the model run here, on every rank, before the first step. `keep_model_files` writes the
files of a Hugging Face folder that saved and exported models of the run need: config.json, as the run trains the model
(rope scaling included), and generation_config.json; the tokenizer's files come with the corpus.
"""

import math
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from longspan.checkpoint.checkpoint import load_checkpoint
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, first_rank_warns, run_on_every_rank, run_on_first_rank
from longspan.config.defaults import warn_about_lost_updates
from longspan.config.file import to_toml
from longspan.config.sections import LoraSection, ModelConfig, RunConfig
from longspan.corpus.build import check_largest_id
from longspan.corpus.tokenizer import copy_generation_settings
from longspan.data.documents import Corpus, CorpusDocuments
from longspan.errors import ConfigError, ModelError, RunFolderError
from longspan.evaluation.auto_degree import choose_degrees
from longspan.files import write_atomically
from longspan.model.adapters import is_adapted
from longspan.model.load import check_folder, torch_dtype
from longspan.model.multimodal.multimodal_model import find_language_model
from longspan.model.parts import is_tied
from longspan.model.seams.call_rules import refuse_randomness
from longspan.model.weights.fill import empty_model, images_class
from longspan.model.weights.hf_folder import no_progress_bars
from longspan.plan import Cost
from longspan.run.checks import check_image_keys
from longspan.run.run_data import RunData, TrainingRun, open_data, with_eval_tables
from longspan.run.set_up.resume import (
    check_steps_left,
    checkpoint_to_resume,
    keep_held_out_count,
    rate_line,
    steps_done,
)
from longspan.train.long_documents import scale_positions
from longspan.train.memory.coming_plans import ComingSteps
from longspan.train.memory.run_memory import UNEVEN, RunMemory
from longspan.train.memory.slot_rows import choose_rows
from longspan.train.plans import find_run_cost, query_heads
from longspan.train.plans.order import set_epoch_steps, source_lines
from longspan.train.plans.resolve import choose_partition_on_ranks, set_node_size, use_machine
from longspan.train.starts import Starts
from longspan.train.terms.mtp import add_configured_depths, depths_line
from longspan.train.training import (
    AnyModel,
    add_configured_adapter,
    load_run_model,
    make_optimizer,
    model_configuration,
    prepare_run_model,
    unread_model,
)

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan


def keep_model_files(
    directory: Path, settings: ModelConfig, configuration: PreTrainedConfig, architecture: str, log: LogLine
) -> None:
    """Write config.json and generation_config.json into a folder, for a model of this configuration and class.

    config.json names the dtype that the weights of model/ are saved in, which a line of the log says if it is another
    than that of the parameters.
    """
    source = Path(settings.source)
    config: Any = deepcopy(configuration)
    config.architectures = [architecture]
    config.dtype = dtype = _saved_dtype(settings, configuration)
    with no_progress_bars():
        config.save_pretrained(directory)
    # model.config may name a file: generation_config.json is looked for beside it; a preset has none
    copy_generation_settings((source.parent if source.is_file() else source) if settings.source else None, directory)
    if dtype != torch_dtype(settings.dtype):
        log(
            f"model/ will be saved in {str(dtype).removeprefix('torch.')}, the dtype of {source}; parameters and "
            f"checkpoints are {settings.dtype}, which longspan export --dtype {settings.dtype} keeps"
        )


def _saved_dtype(settings: ModelConfig, configuration: Any) -> torch.dtype:
    """The dtype of saved folders: that of the source folder or configuration if it names one, else model.dtype."""
    named = configuration.dtype if settings.source else None
    return named if isinstance(named, torch.dtype) and named.is_floating_point else torch_dtype(settings.dtype)


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
    vocabulary = _corpus_vocabulary_size(data, config)
    if config.mtp.depths and not resumed:
        log(run_on_every_rank(world, lambda: depths_line(config, configuration), ModelError))
    images = data.images > 0
    check_image_keys(config, data.images)

    def load() -> Any:
        if resumed and not config.lora.rank:
            return unread_model(config, configuration=configuration, images=images)
        return load_run_model(config, configuration=configuration, vocabulary=vocabulary, images=images)

    with first_rank_warns(world):
        model = run_on_every_rank(world, load, ModelError)
    directory, architecture = Path(config.run.dir), type(model).__name__
    run_on_first_rank(
        world, lambda: keep_model_files(directory, config.model, configuration, architecture, log), RunFolderError
    )
    return prepare_run_model(config, world, model, memory=memory, images=images)


def _corpus_vocabulary_size(data: RunData, config: RunConfig) -> int:
    """Return the number of ids of the tokenizer that data.tokenizer names, else data.vocab_size, that of a new one."""
    return data.tokenizer_size if config.data.tokenizer else config.data.vocab_size


def _fit_configuration(data: RunData, config: RunConfig, world: World, log: LogLine) -> Any:
    """Return the model's configuration for this vocabulary and the longest document.

    Raises ConfigError if the tokenizer does not fit, or the longest document has more tokens than there are positions.
    """
    vocabulary = _corpus_vocabulary_size(data, config)
    configuration = run_on_every_rank(world, lambda: model_configuration(config, vocabulary), ModelError)
    for corpus in (data.corpus, *(s.documents.corpus for s in data.sets if isinstance(s.documents, CorpusDocuments))):
        check_largest_id(corpus, configuration, config.model.source or config.model.preset_name)
    return scale_positions(configuration, config.model, *data.longest, log)


def set_up(config: RunConfig, world: World, log: LogLine, starts: Starts) -> TrainingRun:
    """Open or begin the run of a configuration that `check_config` has passed; all ranks call it together.

    Raises ConfigError, DataError, ModelError or CheckpointError, the same on every rank, for what does not fit.
    `starts` notes how long the parts of the set-up take.
    """
    checkpoint = checkpoint_to_resume(config, world, log)
    config, as_written, data = _open_run_documents(config, checkpoint, world, log)
    configuration = _fit_configuration(data, config, world, log)
    config, why_partition = _choose_run_partition(config, data, configuration, world, log)
    done = 0 if checkpoint is None else steps_done(checkpoint, world)
    starts.end_part("data")
    run_memory = _run_memory(config, data, configuration, world, done)
    config, memory = choose_rows(run_memory, world, log, finished=done == config.train.steps)
    data.check_fit(config, world)  # again: the longest document may need more rows than fit
    starts.end_part("plan of memory")
    model = set_up_model(data, config, configuration, memory, world, log, resumed=checkpoint is not None)
    starts.end_part("model")
    refuse_randomness(find_language_model(model))
    world.seed = config.train.seed
    optimizer = make_optimizer(config, world, model, memory=memory)
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, model, optimizer, world)
        log(f"going on from {checkpoint}: {done} of {config.train.steps} steps are done")
        if done < config.train.steps and (line := rate_line(config, state)):
            log(line)
    if done < config.train.steps:  # a finished run keeps the configuration that it was trained with
        file = Path(config.run.dir) / "config.toml"
        run_on_first_rank(world, lambda: write_atomically(file, to_toml(as_written)), RunFolderError)
        warn_about_lost_updates(config, log)
    price = partial(_model_cost, config, world, model.config, data.corpus, log=log, memory=memory)
    cost = run_on_every_rank(world, price, ConfigError)
    starts.end_part("optimizer and costs")
    run = TrainingRun(config, world, model, optimizer, cost, data.corpus, data.order, done)
    return _resolve_evaluations(replace(run, why_partition=why_partition, memory=memory), data, log)


def _open_run_documents(
    config: RunConfig, checkpoint: Path | None, world: World, log: LogLine
) -> tuple[RunConfig, RunConfig, RunData]:
    """Open the documents of a run; return its configuration, the one to write as config.toml, and the data.

    The configuration then has numbers in place of what depends on documents or hosts: held-out documents, slots of a
    host, and the steps of `train.epochs`.
    """
    config = keep_held_out_count(config, checkpoint, world)
    node_size, config = config.context.node_size, set_node_size(config, world)
    use_machine(config, world, log)
    if config.model.path and checkpoint is None:  # what its files lack is found before a corpus is made
        run_on_every_rank(world, lambda: check_folder(config.model.path), ModelError)
    model_config = run_on_every_rank(world, lambda: model_configuration(config, config.data.vocab_size), ModelError)
    data = open_data(config, model_config, checkpoint, world, log)
    config = replace(config, data=replace(config.data, eval_documents=data.order.held_out_texts))
    # config.toml has what is resolved so far, except node_size, and not the steps of epochs: a run that goes on may be
    # on other hosts, and resolves both anew.
    as_written = replace(config, context=replace(config.context, node_size=node_size))
    config = set_epoch_steps(config, data.order, log)
    for line in source_lines(config, data.order):
        log(line)
    if checkpoint is not None:
        check_steps_left(config, data, world, checkpoint, log)
    data.check_fit(config, world)
    return config, as_written, data


def _choose_run_partition(
    config: RunConfig, data: RunData, configuration: Any, world: World, log: LogLine
) -> tuple[RunConfig, str]:
    """Return the configuration with a partition in place of "auto", and why it was chosen.

    This comes before memory is planned, as the communication types depend on it.
    """
    # without a log or a plan of memory: `set_up` prices the model once more, with both
    price = partial(_model_cost, config, world, configuration, data.corpus, log=lambda line: None, memory=None)
    cost = run_on_every_rank(world, price, ConfigError)
    return choose_partition_on_ranks(config, data.order, world, log, cost=cost, heads=query_heads(data.model))


def _run_memory(config: RunConfig, data: RunData, configuration: Any, world: World, done: int) -> RunMemory:
    """Return the inputs of the plan of memory, for the steps after `done`.

    A slot is expected to encode UNEVEN times the mean rows of images, as some steps have more, but not more than
    encoder.max_rows at once.
    """
    heads, (longest, _) = query_heads(data.model), data.longest
    ahead = ComingSteps(data.order.lengths_of_step, world.home, heads, done, config.train.steps, longest=longest)
    rows = math.ceil(UNEVEN * data.image_rows(config) / world.home.slots)
    return RunMemory(
        config=config,
        model=configuration,
        ahead=ahead,
        gpu=world.device.type == "cuda",
        target_share=_target_share(data.corpus),
        encoder_rows=min(rows, config.encoder.max_rows or rows),
    )


def _resolve_evaluations(run: TrainingRun, data: RunData, log: LogLine) -> TrainingRun:
    lengths, heads = {s.name: s.documents.lengths for s in data.sets}, query_heads(data.model)
    config, why = choose_degrees(run.config, lengths, run.world, log, cost=run.cost, heads=heads)
    return replace(run, config=config, sets=with_eval_tables(data.sets, config), why_degrees=why)


def _model_cost(
    config: RunConfig, world: World, model: Any, corpus: Corpus, log: LogLine, memory: "MemoryPlan | None"
) -> Cost:
    """Return the cost of a model of this configuration.

    Layers keep what the plan of memory says, or without one (None) what the configuration's keys say.
    """
    gpu, share = world.device.type == "cuda", _target_share(corpus)
    slots = world.home.slots
    return find_run_cost(config, model, log, gpu=gpu, slots=slots, target_share=share, memory=memory)


def _target_share(corpus: Corpus) -> float:
    """Return the share of all tokens that are predicted; 1 for a corpus that marks no targets."""
    tokens = max(1, int(corpus.lengths.sum()))
    return 1.0 if corpus.targets is None else min(1.0, float(corpus.targets.sum()) / tokens)

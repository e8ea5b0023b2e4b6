"""From a configuration to everything that a run works with: model, optimizer, corpus, order, and the step it is at.

Every check that needs the data or the model is made here, on every rank, before the first step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.errors import ConfigError, DataError, ModelError, RunFolderError, counted
from longspan.model.hf_folder import weight_files
from longspan.model.multimodal.multimodal_model import language_model_of
from longspan.model.seams.randomness import refuse_randomness
from longspan.plan import Cost
from longspan.plan.cost.spans import with_spans
from longspan.train.all_ranks import LogLine, on_every_rank, on_first_rank
from longspan.train.checkpoint.checkpoint import load_checkpoint
from longspan.train.config.defaults import with_steps
from longspan.train.config.file import to_toml
from longspan.train.config.precision import warn_of_lost_updates
from longspan.train.config.sections import RunConfig
from longspan.train.data.documents import Corpus, Documents
from longspan.train.data.order.source import ORDER, Mixture
from longspan.train.data.order.uncut import UncutSpans
from longspan.train.data.pack_order import PackOrder
from longspan.train.data.step_order import StepOrder
from longspan.train.disk import write_atomically
from longspan.train.evaluation.auto_degree import with_degrees
from longspan.train.memory.rows_that_fit import with_rows_that_fit
from longspan.train.mtp.depths import depths_line
from longspan.train.optim.schedule import Schedule
from longspan.train.plans import cost_of_run, query_heads
from longspan.train.run.checks.encoder import check_images
from longspan.train.run.checks.plans import check_longest
from longspan.train.run.evaluations.open_sets import check_lengths, check_sources, open_sets, with_rows
from longspan.train.run.evaluations.sets import EvaluationSet
from longspan.train.run.kept_files import keep_model_files
from longspan.train.run.long_documents import configuration_for
from longspan.train.run.partition import with_partition
from longspan.train.run.resume import check_steps_left, checkpoint_to_resume, order_version
from longspan.train.run.run_corpus import check_tokenizer, shared_corpus
from longspan.train.training import (
    AnyModel,
    Training,
    configuration_of,
    loaded_model,
    optimizer_of,
    prepared_model,
    unread_model,
)

FEW_STEPS = 10  # a run of epochs with fewer is told how to have more


@dataclass(frozen=True)
class TrainingRun(Training):
    """A run as one rank has it: the model under training, its data, and the number of steps that are done."""

    corpus: Corpus
    order: StepOrder | PackOrder
    done: int
    sets: tuple[EvaluationSet, ...] = ()  # what is evaluated: the held-out documents first, if there are any
    why_degrees: tuple[str, ...] = ()  # of evaluations whose degree was chosen by its cost
    why_partition: str = ""  # of a hybrid, where its cost chose

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.dir / "checkpoints"

    @property
    def held_out(self) -> Documents:
        """The documents that are only evaluated; there may be none."""
        return self.corpus.select(self.order.evaluation)


def set_up(config: RunConfig, world: World, log: LogLine) -> TrainingRun:
    """Open or begin the run of this configuration, which `check_config` has passed; all ranks call it together.

    Raises ConfigError, DataError, ModelError or CheckpointError, the same on every rank, for what does not fit.
    """
    directory = Path(config.run.dir)
    checkpoint = checkpoint_to_resume(config, world, log)
    if config.model.path and checkpoint is None:
        on_every_rank(world, lambda: weight_files(Path(config.model.path)), ModelError)
    named = on_every_rank(world, lambda: configuration_of(config, config.data.vocab_size), ModelError)
    check_sources(config, world, named.get_text_config().vocab_size)
    corpus = shared_corpus(config, world, named, resumed=checkpoint is not None, log=log)
    order = step_order_of(config, corpus, version=order_version(checkpoint, world))
    log(documents_line(config, order))
    sets = open_sets(config, corpus, corpus.select(order.evaluation), world, log)
    sets = on_every_rank(world, lambda: tuple(evaluated.with_images(named, directory) for evaluated in sets), DataError)
    asked, config = config, with_steps_of_epochs(config, order, log)
    for line in source_lines(config, order):
        log(line)
    if checkpoint is not None:
        check_steps_left(config, world, checkpoint, log)
    longest = _longest(config, corpus, order)
    check_fit = partial(_check_fit, longest, sets, named, world)
    check_fit(config)
    images = len(corpus.images or ()) + sum(len(getattr(s.documents, "items", ())) for s in sets)
    data = _Data(corpus.manifest.tokenizer_size, longest, images)
    model = _prepared_for(data, config, world, log, resumed=checkpoint is not None)
    refuse_randomness(language_model_of(model))
    world.seed = config.train.seed
    optimizer = optimizer_of(config, world, model)
    done = 0
    if checkpoint is not None:
        done = int(load_checkpoint(checkpoint, model, optimizer, world)["step"])
        log(f"going on from {checkpoint}: {done} of {config.train.steps} steps are done")
    if done < config.train.steps:  # a finished run keeps the configuration that it was trained with
        on_first_rank(world, lambda: write_atomically(directory / "config.toml", to_toml(asked)), RunFolderError)
        warn_of_lost_updates(config, log)
    cost, heads = _cost(config, world, model, corpus, log), query_heads(named)
    config, why_partition = with_partition(config, order, world, log, cost=cost, heads=heads)
    config = with_rows_that_fit(config, model, optimizer, world, log, image_rows=_image_rows(config, corpus))
    check_fit(config)
    lengths = {s.name: s.documents.lengths for s in sets}
    config, why = with_degrees(config, lengths, world, log, cost=cost, heads=heads)
    sets = with_rows(sets, config)
    return TrainingRun(config, world, model, optimizer, cost, corpus, order, done, sets, why, why_partition)


def _check_fit(
    longest: tuple[int, str], sets: Sequence[EvaluationSet], model: PreTrainedConfig, world: World, config: RunConfig
) -> None:
    """Raise ConfigError where the longest document of the corpus or of a set does not fit."""
    (tokens, origin), heads = longest, query_heads(model)
    check_longest(config, world.home, tokens, origin, heads)
    check_lengths(with_rows(sets, config), config, world.home, model, tokens, heads)


def _longest(config: RunConfig, corpus: Corpus, order: StepOrder | PackOrder) -> tuple[int, str]:
    """The tokens of the longest document that a planner is given, and where it comes from."""
    lengths, data = corpus.lengths, config.data
    if not data.pack_to:
        longest = int(np.argmax(lengths))
        return int(lengths[longest]), corpus.origin(longest)
    packed = data.pack_to if data.pack_attention == "across" else min(data.pack_to, int(lengths.max()))
    held_out = max(order.evaluation, key=lambda document: int(lengths[document]), default=None)
    if held_out is None or lengths[held_out] <= packed:
        return packed, "packs"
    return int(lengths[held_out]), corpus.origin(held_out)


def _image_rows(config: RunConfig, corpus: Corpus) -> float:
    """The rows of images in a step, on all slots together, in the mean."""
    if corpus.images is None or not len(corpus.images):
        return 0.0
    share = float(corpus.images.column("rows").sum()) / float(corpus.lengths.sum())
    return share * config.train.tokens_per_step


def _cost(config: RunConfig, world: World, model: AnyModel, corpus: Corpus, log: LogLine) -> Cost:
    cost = cost_of_run(config, model.config, log, gpu=world.device.type == "cuda")
    if corpus.images is None or not len(corpus.images):
        return cost
    return with_spans(cost, model.config, corpus.images.column("rows").tolist(), int(corpus.lengths.sum()))


def with_steps_of_epochs(config: RunConfig, order: StepOrder | PackOrder, log: LogLine) -> RunConfig:
    """The configuration with the number of steps that `train.epochs` takes. Raises ConfigError for a schedule that does
    not fit them."""
    if not config.train.epochs:
        return config
    steps = order.steps_of_epochs(config.train.epochs)
    documents, tokens = order.stream.documents, order.stream.tokens
    config = with_steps(config, steps)
    Schedule.of(config.train)
    log(
        f"train.epochs {config.train.epochs:g}: {counted(steps, 'step')} over {counted(documents, 'document')} "
        f"({counted(tokens, 'token')}), in place of train.steps; {config.train.warmup_steps} of warm-up"
        + "; fewer tokens a step (train.tokens_per_step) make more steps"
        * (steps < FEW_STEPS)
    )
    return config


def step_order_of(config: RunConfig, corpus: Corpus, *, version: int = ORDER) -> StepOrder | PackOrder:
    """The order of a run's documents; a run that an earlier version began keeps that of its version."""
    data, tokens = config.data, config.train.tokens_per_step
    order = StepOrder(
        corpus.lengths,
        tokens_per_step=tokens,
        seed=config.train.seed,
        eval_documents=data.eval_documents,
        targets=corpus.targets,
        mixture=Mixture(corpus.source_of, tuple(s.weight for s in data.sources)) if data.sources else None,
        version=version,
    )
    if not data.pack_to:
        return order
    across = data.pack_attention == "across"
    return PackOrder(order, pack_to=data.pack_to, tokens_per_step=tokens, across=across, uncut=_uncut(config, corpus))


def _uncut(config: RunConfig, corpus: Corpus) -> UncutSpans | None:
    """The placeholders of each image, which no pack cuts. Raises ConfigError where packs have no room for one."""
    if corpus.images is None or not len(corpus.images):
        return None
    spans = UncutSpans.of(*(np.asarray(corpus.images.column(name)) for name in ("document", "start", "stop")))
    if config.data.pack_to < (least := 2 * spans.longest - 1):
        raise ConfigError(
            f"data.pack_to is {config.data.pack_to}, and an image takes {spans.longest} tokens, which no pack cuts; "
            f"set it to {least} or more, or to 0: micro-batches hold several documents without padding"
        )
    return spans


def documents_line(config: RunConfig, order: StepOrder | PackOrder) -> str:
    """How many documents are trained on, how often the run's steps read them, and how many are held out of that."""
    steps, held_out = config.train.steps, len(order.evaluation)
    tokens = order.stream.tokens
    taken = config.train.tokens_per_step * steps
    line = (
        f"{counted(order.stream.documents, 'document')} to train on, of {counted(tokens, 'token')}, which "
        f"{counted(steps, 'step')} read about {taken / tokens:.3g} times; {held_out} held out (data.eval_documents)"
    )
    if config.data.pack_to:
        within = "across documents" if config.data.pack_attention == "across" else "within documents"
        line += f"; packed to {config.data.pack_to:,} tokens (data.pack_to), attention {within}"
    if config.train.tokens_per_step > tokens:
        line += (
            f"; a step of {config.train.tokens_per_step:,} tokens (train.tokens_per_step) reads documents repeatedly"
        )
    return line


def source_lines(config: RunConfig, order: StepOrder | PackOrder) -> Iterator[str]:
    """Of each of several sources: its share of the tokens, what it has, and how often the run's steps read it."""
    taken = config.train.tokens_per_step * config.train.steps
    sources = order.stream.sources if config.data.sources else ()
    for table, source in zip(config.data.sources, sources, strict=True):
        share = source.weight / sum(each.weight for each in sources)
        yield (
            f"source {table.path}: weight {source.weight:g}, {share:.3g} of the tokens of steps; it has "
            f"{counted(source.documents, 'document')} of {counted(source.tokens, 'token')} to train on, read about "
            f"{taken * share / source.tokens:.3g} times"
        )


class _Data(NamedTuple):
    """What a model must fit: ids of the tokenizer, the longest document and its source, images of all documents."""

    ids: int
    longest: tuple[int, str]
    images: int


def _prepared_for(data: _Data, config: RunConfig, world: World, log: LogLine, *, resumed: bool) -> AnyModel:
    """The run's model, fit for its data, and prepared.

    Of a run that is `resumed` no weight is read or drawn, for its checkpoint has them all, but under [lora]: then it
    has the adapter alone.
    """
    rows = data.ids if config.data.tokenizer else config.data.vocab_size
    named = on_every_rank(world, lambda: configuration_of(config, rows), ModelError)
    check_tokenizer(config, named, data.ids)
    fit = configuration_for(named, config.model, *data.longest, log)
    if config.mtp.depths and not resumed:
        log(on_every_rank(world, lambda: depths_line(config, fit), ModelError))
    images = data.images > 0
    check_images(config, data.images)
    load = unread_model if resumed and not config.lora.rank else partial(loaded_model, vocabulary=rows)
    load = partial(load, images=images)
    model = on_every_rank(world, lambda: load(config, configuration=fit), ModelError)
    keep = partial(keep_model_files, Path(config.run.dir), config.model, fit, type(model).__name__, log)
    on_first_rank(world, keep, RunFolderError)
    return prepared_model(config, world, model, images=images)

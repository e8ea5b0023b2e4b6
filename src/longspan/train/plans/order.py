"""The documents that a run's steps take, their order and how often, and the lines of output about them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from longspan.config.defaults import set_steps
from longspan.config.sections import RunConfig
from longspan.corpus.files import LogLine
from longspan.data.documents import Corpus
from longspan.data.step_order import StepOrder, count_texts
from longspan.data.stream import Mixture
from longspan.errors import ConfigError, plural
from longspan.train.optim.schedule import Schedule

FEW_STEPS = 50  # a run of epochs with fewer gets advice on how to have more
HELD_OUT, ONE_IN = 32, 10  # texts held out by default: one in so many, at most so many


def set_epoch_steps(config: RunConfig, order: StepOrder, log: LogLine) -> RunConfig:
    """Set the number of steps that `train.epochs` takes; ConfigError for none, and a schedule that does not fit."""
    if not config.train.epochs:
        return config
    steps, documents = order.count_steps(), order.stream.documents
    if not steps:
        raise ConfigError(
            f"train.epochs is {config.train.epochs:g}, by which not one of {plural(documents, 'document')} is trained "
            f"on; give at least {1 / documents:.1g}, or train.steps in its place"
        )
    config = set_steps(config, steps)
    Schedule.of(config.train)  # raises where the schedule does not fit
    log(
        f"train.epochs {config.train.epochs:g}: {plural(steps, 'step')} in place of train.steps; "
        f"{config.train.warmup_steps} of warm-up"
    )
    if steps < FEW_STEPS:
        log(_too_few_steps_text(config, order))
    return config


def most_step_tokens(config: RunConfig, order: StepOrder) -> int:
    """Return the most tokens of a step of several documents: with epochs, no more than one of them has."""
    tokens = config.train.tokens_per_step
    return min(tokens, order.stream.tokens) if config.train.epochs else tokens


def _too_few_steps_text(config: RunConfig, order: StepOrder) -> str:
    tokens = int(config.train.epochs * order.stream.tokens)  # of all epochs
    # of a step: FEW_STEPS of them, or as many as may be
    advised_tokens = max(tokens // FEW_STEPS, int(order.lengths.max()))
    size = most_step_tokens(config, order)
    steps = plural(config.train.steps, "optimizer update")
    line = f"only {steps}, of up to {size:,} tokens each: the model will hardly change; "
    if tokens // advised_tokens <= config.train.steps:  # the longest document leaves no room for smaller steps
        return f"{line}more epochs (train.epochs) or more documents give more"
    return f"{line}with --train.tokens_per_step {advised_tokens} there are at least {tokens // advised_tokens}"


def count_held_out(setting: int | str, texts: int) -> int:
    """Count how many texts are held out: the setting, or one in ten, from 1 to 32 but never a run's only one.

    >>> [count_held_out("auto", texts) for texts in (1, 7, 153, 5000)]
    [0, 1, 15, 32]
    """
    if isinstance(setting, int):
        return setting
    return min(HELD_OUT, max(1, texts // ONE_IN), texts - 1)


def make_step_order(config: RunConfig, corpus: Corpus) -> StepOrder:
    data = config.data
    mixture = Mixture(corpus.source_of, tuple(s.weight for s in data.sources)) if data.sources else None
    return order_lengths(
        config, corpus.lengths, targets=corpus.targets, mixture=mixture, texts=corpus.texts, unit=corpus.unit
    )


def order_lengths(
    config: RunConfig,
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    targets: npt.NDArray[Any] | None = None,
    mixture: Mixture | None = None,
    texts: npt.NDArray[Any] | None = None,
    unit: int = 1,
) -> StepOrder:
    """Make the order of documents of these lengths."""
    return StepOrder(
        lengths,
        tokens_per_step=config.train.tokens_per_step,
        seed=config.train.seed,
        eval_documents=count_held_out(config.data.eval_documents, count_texts(lengths, texts)),
        targets=targets,
        mixture=mixture,
        texts=texts,
        epochs=config.train.epochs,
        unit=unit,
    )


def documents_line(config: RunConfig, order: StepOrder) -> str:
    train, stream, held_out = config.train, order.stream, len(order.evaluation)
    line = plural(stream.documents, "document" if order.unit == 1 else "pair")
    line += f" of {plural(order.training_texts, 'text')}" * (stream.documents != order.training_texts)
    line += f" to train on, of {plural(stream.tokens, 'token')}, which "
    if train.epochs:
        line += f"{plural(order.count_steps(), 'step')} read {train.epochs:g} times"
    else:
        times = train.tokens_per_step * train.steps / stream.tokens
        line += f"{plural(train.steps, 'step')} read about {times:.3g} times"
    line += f"; {plural(order.held_out_texts, 'text')}"
    line += f" of {plural(held_out, 'document')}" * (held_out != order.held_out_texts)
    line += " held out (data.eval_documents)"
    if not train.epochs and train.tokens_per_step > stream.tokens:
        line += (
            f"; a step of {train.tokens_per_step:,} tokens (train.tokens_per_step) reads some documents more than once"
        )
    return line


def source_lines(config: RunConfig, order: StepOrder) -> Iterator[str]:
    """Yield a line about each of several sources."""
    tokens_read = config.train.tokens_per_step * config.train.steps
    sources = order.stream.sources if config.data.sources else ()
    for table, source in zip(config.data.sources, sources, strict=True):
        share = source.weight / sum(other.weight for other in sources)
        yield (
            f"source {table.path}: weight {source.weight:g}, {share:.3g} of the tokens of steps; it has "
            f"{plural(source.documents, 'document')} of {plural(source.tokens, 'token')} to train on, read about "
            f"{tokens_read * share / source.tokens:.3g} times"
        )

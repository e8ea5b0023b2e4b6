"""The documents that a run's steps take, their order and how often, and the lines of output about them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.config.defaults import set_steps
from longspan.config.sections import RunConfig
from longspan.corpus.files import LogLine
from longspan.data.documents import Corpus
from longspan.data.step_order import PackOrder, StepOrder, UncutSpans, count_texts
from longspan.data.stream import Mixture
from longspan.errors import ConfigError, plural
from longspan.train.optim.schedule import Schedule

FEW_STEPS = 50  # a run of epochs with fewer gets advice on how to have more
HELD_OUT, ONE_IN = 32, 10  # texts held out by default: one in so many, at most so many


def set_epoch_steps(config: RunConfig, order: StepOrder | PackOrder, log: LogLine) -> RunConfig:
    """Set the number of steps that `train.epochs` takes; ConfigError for a schedule that does not fit them."""
    if not config.train.epochs:
        return config
    steps = order.count_steps()
    config = set_steps(config, steps)
    Schedule.of(config.train)  # raises where the schedule does not fit
    log(
        f"train.epochs {config.train.epochs:g}: {plural(steps, 'step')} in place of train.steps; "
        f"{config.train.warmup_steps} of warm-up"
    )
    if steps < FEW_STEPS:
        log(_few_steps_line(config, order))
    return config


def largest_step(config: RunConfig, order: StepOrder | PackOrder) -> int:
    """Return the most tokens of a step of several documents: with epochs, no more than one of them has."""
    tokens = config.train.tokens_per_step
    return min(tokens, order.stream.tokens) if config.train.epochs else tokens


def _few_steps_line(config: RunConfig, order: StepOrder | PackOrder) -> str:
    tokens = int(config.train.epochs * order.stream.tokens)  # of all epochs
    longest_document = int(order.lengths.max()) if isinstance(order, StepOrder) else config.data.pack_to
    advised_tokens = max(tokens // FEW_STEPS, longest_document)  # of a step: FEW_STEPS of them, or as many as may be
    size = largest_step(config, order)
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


def make_step_order(config: RunConfig, corpus: Corpus) -> StepOrder | PackOrder:
    data = config.data
    mixture = Mixture(corpus.source_of, tuple(s.weight for s in data.sources)) if data.sources else None
    uncut = _uncut_spans(config, corpus) if data.pack_to else None
    return order_lengths(
        config, corpus.lengths, targets=corpus.targets, mixture=mixture, texts=corpus.texts, uncut=uncut
    )


def order_lengths(
    config: RunConfig,
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    targets: npt.NDArray[Any] | None = None,
    mixture: Mixture | None = None,
    texts: npt.NDArray[Any] | None = None,
    uncut: UncutSpans | None = None,
) -> StepOrder | PackOrder:
    """Make the order of documents of these lengths, in packs if data.pack_to is set."""
    data, tokens = config.data, config.train.tokens_per_step
    order = StepOrder(
        lengths,
        tokens_per_step=tokens,
        seed=config.train.seed,
        eval_documents=count_held_out(data.eval_documents, count_texts(lengths, texts)),
        targets=targets,
        mixture=mixture,
        texts=texts,
        epochs=config.train.epochs,
    )
    if not data.pack_to:
        return order
    across = data.pack_attention == "across"
    return PackOrder(order, pack_to=data.pack_to, tokens_per_step=tokens, across=across, uncut=uncut)


def _uncut_spans(config: RunConfig, corpus: Corpus) -> UncutSpans | None:
    if corpus.images is None or not len(corpus.images):
        return None
    spans = UncutSpans(*(np.asarray(corpus.images.column(name)) for name in ("document", "start", "stop")))
    if config.data.pack_to < spans.longest:
        raise ConfigError(
            f"data.pack_to is {config.data.pack_to}, and an image takes {spans.longest} tokens, which no pack cuts; "
            f"set it to {spans.longest} or more, or to 0: micro-batches hold several documents without padding"
        )
    return spans


def documents_line(config: RunConfig, order: StepOrder | PackOrder) -> str:
    train, stream, held_out = config.train, order.stream, len(order.evaluation)
    line = plural(stream.documents, "document")
    line += f" of {plural(order.texts, 'text')}" * (stream.documents != order.texts)
    line += f" to train on, of {plural(stream.tokens, 'token')}, which "
    if train.epochs:
        line += f"{plural(order.count_steps(), 'step')} read {train.epochs:g} times"
    else:
        times = train.tokens_per_step * train.steps / stream.tokens
        line += f"{plural(train.steps, 'step')} read about {times:.3g} times"
    line += f"; {plural(order.held_out_texts, 'text')}"
    line += f" of {plural(held_out, 'document')}" * (held_out != order.held_out_texts)
    line += " held out (data.eval_documents)"
    if config.data.pack_to:
        reach = "across documents" if config.data.pack_attention == "across" else "within documents"
        line += f"; packed to {config.data.pack_to:,} tokens (data.pack_to), attention {reach}"
    if not train.epochs and train.tokens_per_step > stream.tokens:
        line += (
            f"; a step of {train.tokens_per_step:,} tokens (train.tokens_per_step) reads some documents more than once"
        )
    return line


def source_lines(config: RunConfig, order: StepOrder | PackOrder) -> Iterator[str]:
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

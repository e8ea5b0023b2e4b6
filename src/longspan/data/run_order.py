"""The documents that a run's steps take, their order and how often, and the lines of output about them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from longspan.config.defaults import is_demo, set_steps
from longspan.config.keys import AUTO
from longspan.config.plan_section import FAMILY_PLANNERS
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.shared_prefixes import find_families, group_documents
from longspan.data.step_order import StepOrder, count_texts
from longspan.data.stream import Mixture, ShuffledSource
from longspan.errors import ConfigError, plural
from longspan.layout import Integers
from longspan.plain_text import number_text

FEW_STEPS = 50  # a run of epochs with fewer gets advice on how to have more
MANY_TIMES = 10  # a run that reads documents more often is cautioned
# texts held out by default: one in so many, at most so many
HELD_OUT = 32
ONE_IN = 10
DEMO_HELD_OUT = 8  # of a tiny preset at most so many


def set_epoch_steps(config: RunConfig, order: StepOrder, log: Callable[[str], None]) -> RunConfig:
    """Set the number of steps that `train.epochs` takes, and log what is unusual about how often documents are read.

    Raises ConfigError for no step.
    """
    train = config.train
    if train.epochs:
        steps = order.count_steps()
        documents = order.stream.documents
        if not steps:
            raise ConfigError(
                f"train.epochs is {train.epochs:g}, by which not one of {plural(documents, 'document')} is trained "
                f"on; give at least {1 / documents:.1g}, or train.steps in its place"
            )
        config = set_steps(config, steps)
        counted = f" of {train.epochs_of}" if train.epochs_of else ""
        warm_up = plural(config.optimizer.warmup_steps, "step") if config.optimizer.warmup_steps else "none"
        log(f"train.epochs {train.epochs:g}{counted}: {plural(steps, 'step')}; warm-up: {warm_up}")
        if steps < FEW_STEPS:
            log(_too_few_steps_text(config, order))
    for number, source in enumerate(order.stream.sources):
        times = _times_read(config, order, source)
        if times > MANY_TIMES and not _has_exact_epochs(config, order):
            path = config.data.sources[number].path if len(order.stream.sources) > 1 else ""
            log(
                f"caution: these {plural(config.train.steps, 'step')} read every document{path and f' of {path}'} "
                f"about {times:,.0f} times; --train.epochs 1{path and f' --train.epochs_of {path}'} reads each once"
            )
    return config


def _times_read(config: RunConfig, order: StepOrder, source: ShuffledSource) -> float:
    """Return how often the run reads each document of a source, on average."""
    share = source.weight / sum(other.weight for other in order.stream.sources)
    return config.train.tokens_per_step * config.train.steps * share / source.tokens


def _has_exact_epochs(config: RunConfig, order: StepOrder) -> bool:
    """Return whether steps end with epochs: in a run of epochs of one source."""
    return config.train.epochs > 0 and len(order.stream.sources) == 1


def most_step_tokens(config: RunConfig, order: StepOrder) -> int:
    """Return the most tokens of a step of several documents: no more than one epoch has, where a step ends with it."""
    tokens = config.train.tokens_per_step
    return min(tokens, order.stream.tokens) if _has_exact_epochs(config, order) else tokens


def _too_few_steps_text(config: RunConfig, order: StepOrder) -> str:
    """Say that a run has few steps, and how it gets FEW_STEPS or more."""
    tokens = config.train.steps * config.train.tokens_per_step  # of all steps
    if _has_exact_epochs(config, order):
        tokens = int(config.train.epochs * order.stream.tokens)
    # of a step: FEW_STEPS of them, or as many as may be
    advised_tokens = max(tokens // FEW_STEPS, int(order.lengths.max()))
    size = most_step_tokens(config, order)
    steps = plural(config.train.steps, "optimizer update")
    line = f"only {steps}, of up to {size:,} tokens each: the model will hardly change; "
    if tokens // advised_tokens <= config.train.steps:  # the longest document leaves no room for smaller steps
        return f"{line}more epochs (train.epochs) or more documents give more"
    return f"{line}with --train.tokens_per_step {advised_tokens} there are at least {tokens // advised_tokens}"


def count_held_out(setting: int | str, texts: int, *, most: int = HELD_OUT) -> int:
    """Count how many texts are held out: the setting, or one in ten, from 1 to `most` but never a run's only one.

    >>> [count_held_out("auto", texts) for texts in (1, 7, 153, 5000)]
    [0, 1, 15, 32]
    """
    if isinstance(setting, int):
        return setting
    return min(most, max(1, texts // ONE_IN), texts - 1)


def make_step_order(config: RunConfig, corpus: Corpus) -> StepOrder:
    """Make the order of a run's corpus. Raises ConfigError for documents that data.group_prefixes cannot group."""
    data = config.data
    mixture = None
    if data.sources:
        paths = [source.path for source in data.sources]
        counted = paths.index(config.train.epochs_of) if config.train.epochs_of else 0
        mixture = Mixture(corpus.source_of, tuple(source.weight for source in data.sources), counted)
    group = None
    if data.group_prefixes:
        if corpus.unit > 1 or corpus.targets is None:
            rows = "pairs" if corpus.unit > 1 else "texts whose every token is a target"
            raise ConfigError(
                f"data.group_prefixes puts documents with a common prompt together, and these are {rows}"
            )
        group = partial(_group_by_prefix, corpus, config.train.tokens_per_step)
    return order_lengths(
        config,
        corpus.lengths,
        targets=corpus.targets,
        mixture=mixture,
        texts=corpus.texts,
        unit=corpus.unit,
        group=group,
    )


def _group_by_prefix(corpus: Corpus, most_tokens: int, documents: Integers) -> list[Integers]:
    """Return these documents of a corpus in groups that stay in one step."""
    groups = group_documents(corpus.select(documents.tolist()), corpus.source_of[documents], most_tokens)
    return [documents[group] for group in groups]


def allow_sharing(config: RunConfig, order: StepOrder, corpus: Corpus, log: Callable[[str], None]) -> None:
    """Let documents of a step share prefixes (sets `order.sharing`), unless a key or the data are against it."""
    if config.data.share_prefixes != AUTO or corpus.targets is None or corpus.images:
        return
    order.sharing = corpus
    planner = config.context.planner
    separate = {
        f"context.planner {planner}": planner not in FAMILY_PLANNERS,
        "lora.dropout": config.lora.dropout > 0,
    }
    forbid_sharing(order, log, *(name for name, is_on in separate.items() if is_on))


def forbid_sharing(order: StepOrder, log: Callable[[str], None], *reasons: str) -> None:
    """Let no documents share prefixes if there are reasons (`order.sharing`), and log it where some begin alike."""
    if not reasons or order.sharing is None:
        return
    if max(find_families(order.select(order.sharing, 0)).parents) >= 0:
        log(
            f"documents that begin alike are computed whole, which {' and '.join(reasons)} needs"
            " (docs/shared-prefixes.md)"
        )
    order.sharing = None


def order_lengths(
    config: RunConfig,
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    targets: npt.NDArray[Any] | None = None,
    mixture: Mixture | None = None,
    texts: npt.NDArray[Any] | None = None,
    unit: int = 1,
    group: Callable[[Integers], Sequence[Integers]] | None = None,
) -> StepOrder:
    """Make the order of documents of these lengths by the configuration; the rest are arguments of StepOrder."""
    most = DEMO_HELD_OUT if is_demo(config.model) else HELD_OUT
    return StepOrder(
        lengths,
        tokens_per_step=config.train.tokens_per_step,
        seed=config.train.seed,
        eval_documents=count_held_out(config.evaluation.documents, count_texts(lengths, texts), most=most),
        targets=targets,
        mixture=mixture,
        texts=texts,
        epochs=config.train.epochs,
        unit=unit,
        group=group,
    )


def documents_line(config: RunConfig, order: StepOrder) -> str:
    """Say what a run trains on, how often, and what is held out."""
    train = config.train
    stream = order.stream
    held_out = len(order.evaluation)
    line = plural(stream.documents, "document" if order.unit == 1 else "pair")
    if order.groups is not None:
        count = plural(sum(map(len, order.groups)), "document")
        line = f"{count} in {plural(stream.documents, 'group')} that stay in one step (data.group_prefixes)"
    if stream.documents != order.training_texts:
        line += f" of {plural(order.training_texts, 'text')}"
    line += f" to train on, of {plural(stream.tokens, 'token')}, which "
    steps = order.count_steps() if train.epochs else train.steps
    times = f"about {number_text(train.tokens_per_step * steps / stream.tokens)}"
    if _has_exact_epochs(config, order):
        times = f"{train.epochs:g}"
    line += f"{plural(steps, 'step')} read {times} times"
    line += f"; {plural(order.held_out_texts, 'text')}"
    if held_out != order.held_out_texts:
        line += f" of {plural(held_out, 'document')}"
    line += " held out (evaluation.documents)"
    if not _has_exact_epochs(config, order) and train.tokens_per_step > stream.tokens:
        line += f"; a step of {train.tokens_per_step:,} tokens (train.tokens_per_step) reads some documents "
        line += "more than once"
    return line


def source_lines(config: RunConfig, order: StepOrder) -> Iterator[str]:
    """Yield a line about each of several sources."""
    sources = order.stream.sources
    for table, source in zip(config.data.sources, sources, strict=True):
        share = source.weight / sum(other.weight for other in sources)
        yield (
            f"source {table.path}: weight {source.weight:g}, {share:.3g} of the tokens of steps; it has "
            f"{plural(source.documents, 'document')} of {plural(source.tokens, 'token')} to train on, read about "
            f"{number_text(_times_read(config, order, source))} times, and {len(source.held_out):,} held out"
        )

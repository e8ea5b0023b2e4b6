"""How often the steps of a run read its documents: the steps of its epochs, and the lines of output about them."""

from collections.abc import Callable, Iterator

import numpy as np

from longspan.config.defaults import with_steps
from longspan.config.sections import RunConfig
from longspan.data.step_order import StepOrder
from longspan.data.stream import ShuffledSource
from longspan.errors import ConfigError, plural
from longspan.plain_text import number_text

FEW_STEPS = 50  # a run of epochs with fewer gets advice on how to have more
MANY_TIMES = 10  # a run that reads documents more often is cautioned


def with_epoch_steps(config: RunConfig, order: StepOrder, log: Callable[[str], None]) -> RunConfig:
    """Return the configuration with the steps that `train.epochs` takes, and log what is unusual about how often
    documents are read.

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
        config = with_steps(config, steps)
        counted = f" of {train.epochs_of}" if train.epochs_of else ""
        warm_up = plural(config.optimizer.warmup_steps, "step") if config.optimizer.warmup_steps else "none"
        log(f"train.epochs {train.epochs:g}{counted}: {plural(steps, 'step')}; warm-up: {warm_up}")
        if steps < FEW_STEPS:
            log(_too_few_steps_text(config, order))
    for number, source in enumerate(order.stream.sources):
        times = _readings_per_document(config, order, source)
        if times > MANY_TIMES and not _has_exact_epochs(config, order):
            path = config.data.sources[number].path if len(order.stream.sources) > 1 else ""
            log(
                f"caution: these {plural(config.train.steps, 'step')} read every document{path and f' of {path}'} "
                f"about {times:,.0f} times; --train.epochs 1{path and f' --train.epochs_of {path}'} reads each once"
            )
    return config


def _readings_per_document(config: RunConfig, order: StepOrder, source: ShuffledSource) -> float:
    share = source.weight / sum(other.weight for other in order.stream.sources)
    return order.step_tokens(config.train.steps) * config.train.steps * share / source.tokens


def _has_exact_epochs(config: RunConfig, order: StepOrder) -> bool:
    return config.train.epochs > 0 and len(order.stream.sources) == 1


def most_step_tokens(config: RunConfig, order: StepOrder) -> int:
    """Return the most tokens of a step of several documents: no more than one epoch has, where a step ends with it."""
    tokens = config.train.tokens_per_step
    return min(tokens, order.stream.tokens) if _has_exact_epochs(config, order) else tokens


def _too_few_steps_text(config: RunConfig, order: StepOrder) -> str:
    run_tokens = config.train.steps * config.train.tokens_per_step
    if _has_exact_epochs(config, order):
        run_tokens = int(config.train.epochs * order.stream.tokens)
    # A step has as few tokens as give FEW_STEPS steps, but room for the longest document.
    step_tokens = max(run_tokens // FEW_STEPS, int(order.lengths.max()))
    steps = run_tokens // step_tokens
    updates_text = plural(config.train.steps, "optimizer update")
    most_tokens = most_step_tokens(config, order)
    line = f"only {updates_text}, of up to {most_tokens:,} tokens each: the model will hardly change; "
    if steps <= config.train.steps:  # the longest document leaves no room for smaller steps
        return f"{line}more epochs (train.epochs) or more documents give more"
    return f"{line}with --train.tokens_per_step {step_tokens} there are at least {steps}"


def documents_line(config: RunConfig, order: StepOrder) -> str:
    """Say what a run trains on, how often, and what is held out."""
    train = config.train
    stream = order.stream
    held_out = len(order.evaluation) // order.unit
    # Of KTO's documents every other one is a prompt with another row's answer, which only estimates the divergence.
    is_kto = train.row_form == "kto"
    name = "answer" if is_kto else "document" if order.unit == 1 else "pair"
    line = plural(stream.documents, name)
    if order.groups is not None:
        documents_text = plural(sum(map(len, order.groups)), "document")
        line = (
            f"{documents_text} in {plural(stream.documents, 'group')} that stay in one step (data.group_prefixes)"
        )
    if stream.documents != order.training_texts:
        line += f" of {plural(order.training_texts, 'text')}"
    tokens_text = plural(stream.tokens, "token")
    if is_kto:
        answers = order.lengths[::2].sum(dtype=np.int64) - order.lengths[[*order.evaluation[::2]]].sum(
            dtype=np.int64
        )
        tokens_text = f"{plural(int(answers), 'token')} ({stream.tokens:,} with the mismatched answers of steps)"
    line += f" to train on, of {tokens_text}, which "
    steps = order.count_steps() if train.epochs else train.steps
    times_text = f"about {number_text(order.step_tokens(steps) * steps / stream.tokens)}"
    if _has_exact_epochs(config, order):
        times_text = f"{train.epochs:g}"
    line += f"{plural(steps, 'step')} read {times_text} times"
    line += f"; {plural(order.held_out_texts, 'text')}"
    if held_out != order.held_out_texts:
        line += f" of {plural(held_out, name)}"
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
            f"{number_text(_readings_per_document(config, order, source))} times, and {len(source.held_out):,} held out"
        )

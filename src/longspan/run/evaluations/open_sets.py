"""All evaluation sets of a run, opened and checked before its first step, the same on every rank."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedConfig

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, on_every_rank, on_first_rank
from longspan.config.eval_inheritance import held_out_set
from longspan.config.sections import RunConfig
from longspan.corpus.token_bytes import token_bytes
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.documents import Corpus, Documents
from longspan.errors import ConfigError, DataError, EvaluationError
from longspan.evaluation.metrics import check_metrics, load_metrics
from longspan.evaluation.sets import MADE, EvaluationSet, check_paths, files_in_both, open_set
from longspan.layout import Layout
from longspan.run.checks.plans import check_longest_of_set
from longspan.train.long_documents import check_known


def check_sources(config: RunConfig, world: World, vocabulary: int) -> None:
    """Raise on every rank, before a corpus is built, for a path that is missing, and for what is no metric."""

    def check() -> None:
        for entry in (held_out_set(config), *config.eval):
            try:
                check_metrics(load_metrics(entry.metrics, entry.metrics_key), {}, vocabulary, world.device)
            except EvaluationError as error:
                raise ConfigError(f"{entry.metrics_key}: {error}") from error

    check_paths(config, world)
    on_every_rank(world, check, ConfigError)


def open_sets(
    config: RunConfig, corpus: Corpus, held_out: Documents, world: World, log: LogLine
) -> tuple[EvaluationSet, ...]:
    """The documents that a run holds out, where there are any, and the sets of its tables [[eval]], in order.

    All ranks call it together, once the run has its tokenizer; says what each set holds. Raises DataError for texts
    that cannot be read, on every rank.
    """
    sets = [EvaluationSet(held_out_set(config), held_out)] if held_out else []
    for entry in config.eval:
        opened = open_set(config, entry, world, log)
        log(opened.line())
        if both := files_in_both(corpus, opened):
            log(both)
        sets.append(opened)
    if not sets:
        return ()
    directory = Path(config.run.dir)
    counts = on_first_rank(world, lambda: token_bytes(load_tokenizer(directory).engine), DataError)
    named = [load_metrics(s.config.metrics, s.config.metrics_key) for s in sets]
    return tuple(
        replace(s, metrics={**s.metrics, **metrics}, token_bytes=counts) for s, metrics in zip(sets, named, strict=True)
    )


def check_lengths(
    sets: Sequence[EvaluationSet],
    config: RunConfig,
    home: Layout,
    model: PreTrainedConfig,
    longest: int,
    heads: int | None,
) -> None:
    """Raise ConfigError where the longest document of a named set fits no group of slots, or the model's positions.

    `longest` are the tokens of the longest document of the run's corpus, by which positions are scaled.
    """
    for entry in (s for s in sets if s.name):
        tokens, origin = entry.longest
        check_longest_of_set(config, entry.config, home, tokens, origin, heads)
        made = entry.config.path in MADE
        check_known(model, config.model, longest, entry.name, tokens, made=made)


def with_rows(sets: Sequence[EvaluationSet], config: RunConfig) -> tuple[EvaluationSet, ...]:
    """The sets with the tables of a configuration in which the rows of a slot are known."""
    entries = {entry.name: entry for entry in (held_out_set(config), *config.eval)}
    return tuple(replace(s, config=entries[s.name]) for s in sets)

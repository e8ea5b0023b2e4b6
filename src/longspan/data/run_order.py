"""The order of the documents that a run's steps take, and whether they share prefixes, by the configuration."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from longspan.config.defaults import is_demo
from longspan.config.keys import AUTO
from longspan.config.plan_section import PREFIX_PLANNERS
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.shared_prefixes import find_prefix_trees, group_documents
from longspan.data.step_order import StepOrder, count_texts
from longspan.data.stream import Mixture
from longspan.errors import ConfigError
from longspan.layout import Integers
from longspan.plan.shape.positions import LengthLimit
from longspan.plan.shape.sharing_rules import SharingRules

# texts held out by default: one in so many, at most so many
MOST_HELD_OUT = 32
ONE_IN = 10
# A tiny preset holds out at most this many.
DEMO_MOST_HELD_OUT = 8


def count_held_out(setting: int | str, texts: int, *, most: int = MOST_HELD_OUT) -> int:
    """Count how many of a run's texts are held out: the setting, or one in ten, from 1 to `most`, but not the only one.

    >>> [count_held_out("auto", texts) for texts in (1, 7, 153, 5000)]
    [0, 1, 15, 32]
    """
    if isinstance(setting, int):
        return setting
    return min(most, max(1, texts // ONE_IN), texts - 1)


def make_step_order(
    config: RunConfig,
    corpus: Corpus,
    rules: SharingRules | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> StepOrder:
    """Make the order of a run's corpus. Raises ConfigError for documents that data.group_prefixes cannot group.

    Documents of a step share prefixes where the model's `rules` (None: none share), the keys and the data allow it. A
    line says what is against it where documents of the first step begin alike.
    """
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
    reasons = list[str]()
    may_share = config.data.share_prefixes == AUTO and corpus.targets is not None and not corpus.images
    if may_share and rules is not None:
        reasons = [*_keys_against_sharing(config), *rules.against]
    order = order_lengths(
        config,
        corpus.lengths,
        targets=corpus.targets,
        mixture=mixture,
        texts=corpus.texts,
        unit=corpus.unit,
        group=group,
        sharing=corpus if may_share and rules is not None and not reasons else None,
        length_limits=rules.length_limits if rules is not None else (),
    )
    if reasons and max(find_prefix_trees(order.select(corpus, 0)).parents) >= 0:
        log(
            f"documents that begin alike are computed whole, which {' and '.join(reasons)} needs"
            " (docs/shared-prefixes.md)"
        )
    return order


def _group_by_prefix(corpus: Corpus, most_tokens: int, documents: Integers) -> list[Integers]:
    groups = group_documents(corpus.select(documents.tolist()), corpus.source_of[documents], most_tokens)
    return [documents[group] for group in groups]


def _keys_against_sharing(config: RunConfig) -> list[str]:
    planner = config.context.planner
    is_against = {
        f"context.planner {planner}": planner not in PREFIX_PLANNERS,
        "lora.dropout": config.lora.dropout > 0,
    }
    return [name for name, holds in is_against.items() if holds]


def order_lengths(
    config: RunConfig,
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    targets: npt.NDArray[Any] | None = None,
    mixture: Mixture | None = None,
    texts: npt.NDArray[Any] | None = None,
    unit: int = 1,
    group: Callable[[Integers], Sequence[Integers]] | None = None,
    sharing: Corpus | None = None,
    length_limits: tuple[LengthLimit, ...] = (),
) -> StepOrder:
    """Make the order of documents of these lengths by the configuration; the rest are arguments of StepOrder."""
    most = DEMO_MOST_HELD_OUT if is_demo(config.model) else MOST_HELD_OUT
    return StepOrder(
        lengths,
        tokens_per_step=config.train.tokens_per_step,
        seed=config.train.seed,
        eval_documents=count_held_out(config.evaluation.documents, count_texts(lengths, texts, unit), most=most),
        targets=targets,
        mixture=mixture,
        texts=texts,
        epochs=config.train.epochs,
        unit=unit,
        group=group,
        sharing=sharing,
        length_limits=length_limits,
    )

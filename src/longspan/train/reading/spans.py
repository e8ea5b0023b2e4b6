"""Which rows of a shard's documents see each other beside the causal mask: an image's, or those of a prefix."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from longspan.comm import SequenceShard
from longspan.data.document import NO_TARGET, Labelled
from longspan.errors import DataError
from longspan.model.seams.call_rules import CallRules
from longspan.plan.items import ItemTable

_RUN = 4096  # labels that are read at a time


def with_spans(shard: SequenceShard, rules: CallRules, documents: Any, items: ItemTable | None) -> SequenceShard:
    """The shard, and where a model's rules say so, which of its rows see each other.

    Raises DataError for a prefix that the model's window would cut, and for pieces of documents with one each.
    """
    if rules.prefix:
        return shard.with_spans(dict(_prefixes(shard, rules, documents, items)))
    if not rules.in_spans:
        return shard
    inside = shard.micro_batch.documents if items is not None else ()
    return shard.with_spans({d: items.runs(d, rules.in_spans) for d in inside if items is not None})


def _prefixes(
    shard: SequenceShard, rules: CallRules, documents: Any, items: ItemTable | None
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Of each document of which this rank may hold rows."""
    groups = [part.group for part in shard.parts if part.index >= 0]
    for group in groups:
        for number, length in zip(group.documents, group.lengths, strict=True):
            document = documents[number]
            if len(getattr(document, "pieces", ())) > 1:
                raise DataError(
                    f"document {number} is a pack of {len(document.pieces)} pieces, and in {rules.architecture} each "
                    "has a prefix of its own; use data.pack_to = 0: micro-batches hold several documents"
                )
            prefix = prefix_of(document, number, length, items)
            if rules.prefix_window is not None and prefix > rules.prefix_window:
                raise DataError(
                    f"document {number} has a prefix of {prefix} rows, and layers of {rules.architecture} a window of "
                    f"{rules.prefix_window}, which a prefix is not cut by; give shorter prompts"
                )
            yield number, [(0, prefix)] if prefix else []


def prefix_of(document: Any, number: int, length: int, items: ItemTable | None = None) -> int:
    """How many rows of a document stand before its first target, all where it has none.

    The first token is no target, but one of a document without labels may follow it.
    """
    for start in range(0, length, _RUN):
        positions = np.arange(start, min(start + _RUN, length))
        targets = positions > 0
        if isinstance(document, Labelled):
            targets = np.asarray(document.labels(positions)) != NO_TARGET
        if items is not None:
            targets = targets & ~items.covered(number, start, int(positions[-1]) + 1)
        if targets.any():
            return start + int(targets.argmax())
    return length

"""Rows that see each other besides the causal mask: prefixes of documents, and items such as images."""

from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.comm import SequenceShard
from longspan.data.document import NO_TARGET, Labelled
from longspan.errors import DataError
from longspan.model.seams.call_rules import CallRules

if TYPE_CHECKING:
    from longspan.plan.items.encoding_plan import ItemTable


_RUN = 4096  # labels that are read at a time, until one is a target


def bind_spans(shard: SequenceShard, rules: CallRules, documents: Any, items: "ItemTable | None") -> SequenceShard:
    """Return the shard with its spans: rows that see each other both ways, a prefix's or an item's, by the model's
    rules.

    `items` is the table of the step's items, None without encoders. Spans are runs (first row, end) by document. Raises
    DataError for a prefix that is longer than the layers' window, which would cut it.
    """
    if not rules.prefix:
        item_spans = (
            {} if items is None else {d: items.runs(d, rules.in_spans) for d in shard.micro_batch.documents}
        )
        return shard.with_spans(item_spans)
    prefixes = dict[int, list[tuple[int, int]]]()
    groups = [shard_part.group for shard_part in shard.parts if shard_part.index >= 0]  # −1: padding
    for number, length in (pair for group in groups for pair in zip(group.documents, group.lengths, strict=True)):
        prefix = count_prefix_rows(documents[number], number, length, items)
        if rules.prefix_window is not None and prefix > rules.prefix_window:
            raise DataError(
                f"document {number} has a prefix of {prefix} rows, and layers of {rules.architecture} a window of "
                f"{rules.prefix_window}, which a prefix is not cut by; give shorter prompts"
            )
        prefixes[number] = [(0, prefix)] if prefix else []
    return shard.with_spans(prefixes)


def count_prefix_rows(document: Any, number: int, length: int, items: "ItemTable | None" = None) -> int:
    """Return how many rows of a document stand before its first target; all `length` if it has no target.

    `number` is the document's in the plan, by which `items` know its placeholders: these are no targets. Labels are
    read a few thousand at a time, until one is a target.
    """
    # A gathered document, whose rows may be on other ranks, knows the number.
    if (known_rows := getattr(document, "rows_before_targets", None)) is not None:
        return known_rows
    for start in range(0, length, _RUN):
        positions = np.arange(start, min(start + _RUN, length))
        # Without labels every token but the first is a target.
        is_target = positions > 0
        if isinstance(document, Labelled):
            is_target = np.asarray(document.labels(positions)) != NO_TARGET
        if items is not None:
            is_target = is_target & ~items.placeholder_mask(number, start, int(positions[-1]) + 1)
        if is_target.any():
            return start + int(is_target.argmax())
    return length

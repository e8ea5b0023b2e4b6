"""What rows take that see later rows of their span: tokens of an image which see each other, beside the causal pairs.

A span of n rows has n (n - 1) / 2 such pairs in each layer where its rows see each other (`ModelShape.span_layers`), of
a window too, which limits the past alone.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.model_shape import ModelShape


def later_pairs(spans: Iterable[int]) -> int:
    """Pairs of a row and a later row of its span, of spans of so many rows.

    >>> later_pairs([256, 4])
    32646
    """
    return sum(rows * (rows - 1) // 2 for rows in spans)


def with_spans(cost: Cost, config: Any, spans: Iterable[int], tokens: int) -> Cost:
    """A model's cost for documents of `tokens` rows in all, of which spans of so many rows see each other.

    >>> cost = with_spans(cost, "gemma-3-4b-it/config.json", [256] * 64, 32768)  # doctest: +SKIP

    Pairs count at the rate of attention, in the mean over rows: 256 rows of an image take Gemma 3 (4B) 0.4% more than
    as many of text. Of models whose images do not see each other, and of those that no configuration prices, it is the
    cost itself.
    """
    try:
        shape = ModelShape.of(config)
    except PlanError:
        return cost
    full = shape.layers - shape.window_layers - shape.chunk_layers
    if not (shape.span_layers and full and tokens):
        return cost
    pair_seconds = 2 * cost.attention_seconds / full  # causal attention over L rows has L² / 2 pairs
    added = shape.span_layers * pair_seconds * later_pairs(spans) / tokens
    forward = cost.forward and with_spans(cost.forward, config, spans, tokens)
    return replace(cost, linear_seconds=cost.linear_seconds + added, forward=forward)

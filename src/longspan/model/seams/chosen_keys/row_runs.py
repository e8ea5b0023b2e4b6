"""Index keys of a group, and runs of rows that choose among them at a time: what the indexers of every kind share."""

import inspect
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from longspan.attention.members import Members

# The indexer's heads are made of the queries of so many rows at a time.
ROWS_AT_ONCE = 4096
# The scores of all heads that are held at a time take so much; what is made of them takes as much again.
_SCORE_BYTES = 256 << 20


def bind_arguments(indexer: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an indexer's call by name."""
    signature = inspect.signature(inspect.unwrap(type(indexer).forward))
    arguments = dict(signature.bind(indexer, *args, **kwargs).arguments)
    del arguments["self"]
    return arguments


def with_cache(arguments: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Return an indexer's arguments with another cache, which older classes call past_key_values."""
    (name,) = arguments.keys() & {"cache", "past_key_values"}
    return arguments | {name: cache}


def gather_keys(keys: Tensor, members: Members) -> Tensor:
    """Gather index keys: this member's (s, head size) to the group's (S, head size), document after document.

    All members enter.
    """
    if members.degree == 1:
        return keys[members.document_order((0,))]
    gathered = members.channel.all_gather_rows(keys.contiguous(), members.counts, "index keys").wait()
    return gathered[members.document_order(members.channel.row_starts(members.counts))]


def row_runs(members: Members, heads: int, stride: int = 1) -> Iterator[tuple[int, slice, slice, slice]]:
    """Yield runs of one document's rows: the document's index, and (rows, positions, document rows) as slices.

    Rows count within the member's part, positions within the document; document rows are where the whole document lies
    among the group's rows. The scores of `heads` heads of a run, one for each `stride` keys, fit _SCORE_BYTES (0 heads:
    ROWS_AT_ONCE alone bounds it).
    """
    laid_out = members.part.group.laid_out
    first_keys = list(accumulate(laid_out, initial=0))
    for document, start, stop, offset in members.real_segments(members.member):
        row_bytes = 4 * heads * -(-stop // stride)
        at_once = min(ROWS_AT_ONCE, max(1, _SCORE_BYTES // row_bytes)) if heads else ROWS_AT_ONCE
        for first in range(start, stop, at_once):
            last = min(first + at_once, stop)
            rows = slice(offset + first - start, offset + last - start)
            yield (
                document,
                rows,
                slice(first, last),
                slice(first_keys[document], first_keys[document] + laid_out[document]),
            )


def argument_rows(value: Any, count: int, rows: slice) -> Any:
    """Return some rows of an argument: tensors (1, count, …) and tuples of them are cut, anything else stays whole."""
    if isinstance(value, tuple | list):
        return tuple(argument_rows(x, count, rows) for x in value)
    is_by_row = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == count
    return value[:, rows] if is_by_row else value

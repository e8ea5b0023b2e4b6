"""Rows of other modules among the local hidden states, by local row: the whole sequence is never built."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from longspan.comm import SequenceShard


def splice(embeddings: Tensor, shard: SequenceShard) -> Tensor:
    """Token embeddings (1, T, D) with the rows of `shard.derived.spliced` in their places; a copy if there are any.

    The rows (n, D) are cast to the embeddings' type; what they replace gets a zero gradient.
    """
    derived = shard.derived
    for places, rows in derived.spliced.get(derived.ahead, ()):
        embeddings = embeddings.index_copy(1, places, rows.to(embeddings.dtype)[None])
    return embeddings


@contextmanager
def tokens_ahead(shard: Any, tokens: int) -> Iterator[None]:
    """Inside, embeddings are those of the tokens so many further on than the shard's rows, and so are rows spliced.

    What is no shard, in a trial on the meta device, is left alone.
    """
    if not isinstance(shard, SequenceShard):
        yield
        return
    shard.derived.ahead = tokens
    try:
        yield
    finally:
        shard.derived.ahead = 0


def add_rows(hidden: Tensor, shard: SequenceShard, layer: int) -> Tensor:
    """Hidden states (1, T, D) that a decoder layer returned, with what `shard.derived.added` has for it added."""
    for places, rows in shard.derived.added.get(layer, ()):
        hidden = hidden.index_add(1, places, rows.to(hidden.dtype)[None])
    return hidden

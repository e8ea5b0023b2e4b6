"""Rows of other modules among the local hidden states, by local row: the whole sequence is never built."""

from torch import Tensor

from longspan.comm import SequenceShard


def splice(embeddings: Tensor, shard: SequenceShard) -> Tensor:
    """Token embeddings (1, T, D) with the rows of `shard.derived.spliced` in their places; a copy if there are any.

    The rows (n, D) are cast to the embeddings' type; what they replace gets a zero gradient.
    """
    for places, rows in shard.derived.spliced:
        embeddings = embeddings.index_copy(1, places, rows.to(embeddings.dtype)[None])
    return embeddings


def add_rows(hidden: Tensor, shard: SequenceShard, layer: int) -> Tensor:
    """Hidden states (1, T, D) that a decoder layer returned, with what `shard.derived.added` has for it added."""
    for places, rows in shard.derived.added.get(layer, ()):
        hidden = hidden.index_add(1, places, rows.to(hidden.dtype)[None])
    return hidden

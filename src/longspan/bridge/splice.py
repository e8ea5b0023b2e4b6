"""Rows of other modules among the local token embeddings, by local row: the whole sequence is never built."""

from torch import Tensor

from longspan.comm import SequenceShard


def splice(embeddings: Tensor, shard: SequenceShard) -> Tensor:
    """Token embeddings (1, T, D) with the rows of `shard.derived.spliced` in their places; a copy if there are any.

    The rows (n, D) are cast to the embeddings' type; what they replace gets a zero gradient.
    """
    for places, rows in shard.derived.spliced:
        embeddings = embeddings.index_copy(1, places, rows.to(embeddings.dtype)[None])
    return embeddings

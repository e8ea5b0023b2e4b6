"""Rows of other modules among the local token embeddings, by local row: the whole sequence is never built."""

from torch import Tensor

from longspan.comm import SequenceShard
from longspan.errors import ModelError


def splice(embeddings: Tensor, shard: SequenceShard) -> Tensor:
    """Token embeddings (1, T, D) with the rows of `shard.derived.spliced` in their places; a copy if there are any.

    The rows are cast to the embeddings' type; what they replace gets a zero gradient. Raises ModelError where the rows
    have another width.
    """
    for places, rows in shard.derived.spliced:
        if rows.shape[-1] != embeddings.shape[-1]:
            raise ModelError(
                f"the encoder makes rows of width {rows.shape[-1]}, the language model embeds tokens in "
                f"{embeddings.shape[-1]}; end the encoder with a projector to {embeddings.shape[-1]}"
            )
        embeddings = embeddings.index_copy(1, places, rows.to(embeddings.dtype)[None])
    return embeddings

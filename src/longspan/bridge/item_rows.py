"""Rows of items (images) in a language model: spliced into its token embeddings, added to hidden states."""

from typing import Any

from torch import Tensor

from longspan.comm import SequenceShard

AHEAD = "tokens_ahead"  # the keyword of an input embedding that is called for later tokens than the shard's rows


def splice_rows(embeddings: Tensor, shard: SequenceShard, ahead: int) -> Tensor:
    """Put the rows of `shard.derived.spliced` into token embeddings (1, T, D); into a copy if there are any.

    The embeddings are those of the tokens `ahead` positions after the shard's rows (multi-token prediction). `spliced`
    has local row indices (n,) and rows (n, D), which are cast to the embeddings' type; what they replace gets a zero
    gradient.
    """
    for places, rows in shard.derived.spliced.get(ahead, ()):
        embeddings = embeddings.index_copy(1, places, rows.to(embeddings.dtype)[None])
    return embeddings


def embedding_arguments(shard: Any, ahead: int) -> dict[str, int]:
    """Return keywords for an input embedding that is called for tokens `ahead` places after a shard's rows.

    There are none unless rows are spliced for this shard: then hooks of the embedding take the keyword
    (`MultimodalModel`). In place of a shard there may be a probe on the meta device, which has no rows.
    """
    if isinstance(shard, SequenceShard) and shard.derived.spliced:
        return {AHEAD: ahead}
    return {}


def add_rows(hidden: Tensor, shard: SequenceShard, layer: int) -> Tensor:
    """Add the rows of `shard.derived.added` for a decoder layer to the hidden states (1, T, D) that the layer returned.

    `added` has local row indices (n,) and rows (n, D) for each layer, such as DeepStack's features of images.
    """
    for places, rows in shard.derived.added.get(layer, ()):
        hidden = hidden.index_add(1, places, rows.to(hidden.dtype)[None])
    return hidden

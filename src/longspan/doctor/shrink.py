"""Small copies of models, for proofs; they are made in `model/small/`."""

from longspan.model.small.shrink import shrunken, tiny_model

__all__ = ["shrunken", "tiny_model"]

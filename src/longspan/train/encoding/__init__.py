"""The encoders' part of a step: waves of items, encoded, brought to the owners of their rows, and back."""

from longspan.train.encoding.encoding import Encoding, items_of, read_encoding

__all__ = ["Encoding", "items_of", "read_encoding"]

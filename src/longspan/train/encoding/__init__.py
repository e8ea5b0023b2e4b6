"""The encoders' part of a step: waves of items, encoded, brought to the owners of their rows, and back."""

from longspan.train.encoding.ahead import plan_waves_ahead
from longspan.train.encoding.encoding import Encoding, items_of
from longspan.train.encoding.read import read_encoding
from longspan.train.encoding.times import EncoderTimes

__all__ = ["EncoderTimes", "Encoding", "items_of", "plan_waves_ahead", "read_encoding"]

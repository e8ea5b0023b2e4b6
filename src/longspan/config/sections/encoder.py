"""The section [encoder] of a configuration: the tower and projector of a vision-language model. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from longspan.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class EncoderSection:
    """The tower and projector of a model from images and text to text, where data has images (docs/multimodal.md)."""

    train: Literal["", "all", "projector", "none"] = ""
    """What of it is trained: all (tower and projector), projector, or none. Default: all; beside adapters (lora.rank):
    none."""
    lr: NonNegativeFloat = 0.0
    """Its peak learning rate, scheduled as train.lr; 0: train.lr."""
    tp: PositiveInt = 1
    """Tensor-parallel degree of its home, which is over all ranks of the run."""
    max_rows: NonNegativeInt = 0
    """Rows of images that a slot encodes at once, which bounds memory; 0: all images of a step at once."""
    recompute: bool = False
    """Encode images again before their backward pass, so that activations of one wave are kept at a time."""

"""The section [lora] of a configuration. Imports no torch."""

from dataclasses import dataclass

from longspan.config.bounds import NonNegativeFloat, NonNegativeInt

LANGUAGE_MODEL, PROJECTOR, TOWER = PARTS = ("language_model", "projector", "tower")  # as in model/lora/targets.py


@dataclass(frozen=True)
class LoraSection:
    """LoRA: adapters are trained and saved, and the model's own weights stay as they are (docs/fine-tuning.md)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters, which alone are trained and saved; 0: none, and all weights are trained."""
    alpha: NonNegativeFloat = 0.0
    """An adapter's output is multiplied by alpha / rank; 0: twice the rank."""
    dropout: NonNegativeFloat = 0.0
    """Share of an adapter's inputs that are dropped in training; each rank draws for its own rows, so not under tp."""
    targets: tuple[str, ...] = ()
    """Names of the linears that get one, such as q_proj or lm_head; empty: every linear of the decoder layers, and of
    the other parts that are named."""
    parts: tuple[str, ...] = (LANGUAGE_MODEL,)
    """Where: language_model, and of a model from images and text to text projector and tower."""

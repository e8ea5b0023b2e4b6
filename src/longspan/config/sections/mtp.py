"""The section [mtp] of a configuration: multi-token prediction. Imports no torch."""

from dataclasses import dataclass

from longspan.config.bounds import AUTO, NonNegativeFloat, NonNegativeInt

RANDOM = "random"  # as mtp.weights


@dataclass(frozen=True)
class MtpSection:
    """Multi-token prediction: layers behind the model's last one, which learn tokens further ahead (docs/mtp.md)."""

    depths: NonNegativeInt = 0
    """Tokens beyond the next one that each position predicts too, each by a layer of its own; 0: none."""
    loss_weight: NonNegativeFloat = 0.3
    """Weight of the mean of their losses beside the loss of the next token, in the gradient."""
    weights: str = AUTO
    """A folder whose weights of these layers are read, random, or auto: those of model.path where it has any, else
    random."""
    train_whole: bool = False
    """Beside adapters (lora.rank): train all weights of these layers, which then have no adapters of their own."""

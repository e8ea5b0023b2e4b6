"""A zoo of silent errors of other systems, each with a check that it does not happen here.

`longspan doctor --zoo` runs them on the user's machine; docs/zoo.md is written from the same records.
"""

from longspan.doctor.zoo import attention, layers, losses, runs, tokens
from longspan.doctor.zoo.known_error import LIMIT, KnownError

GROUPS: dict[str, tuple[KnownError, ...]] = {
    "Losses and gradients": losses.ERRORS,
    "Tokens, labels and evaluation": tokens.ERRORS,
    "Attention": attention.ERRORS,
    "Layers": layers.ERRORS,
    "Runs": runs.ERRORS,
}
KNOWN_ERRORS: tuple[KnownError, ...] = tuple(error for group in GROUPS.values() for error in group)

__all__ = ["GROUPS", "KNOWN_ERRORS", "LIMIT", "KnownError"]

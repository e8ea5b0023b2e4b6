"""A zoo of silent errors of other systems, each with a check that it does not happen here; docs/zoo.md is its page."""

from tests.zoo import attention, layers, losses, runs, tokens
from tests.zoo.known_error import LIMIT, KnownError

GROUPS: dict[str, tuple[KnownError, ...]] = {
    "Losses and gradients": losses.ERRORS,
    "Tokens, labels and evaluation": tokens.ERRORS,
    "Attention": attention.ERRORS,
    "Layers": layers.ERRORS,
    "Runs": runs.ERRORS,
}
KNOWN_ERRORS: tuple[KnownError, ...] = tuple(error for group in GROUPS.values() for error in group)

__all__ = ["GROUPS", "KNOWN_ERRORS", "LIMIT", "KnownError"]

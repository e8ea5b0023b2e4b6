"""Which documents of passkey retrieval are made: values of flags and of configurations. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.errors import DataError, counted

PASSKEY = "passkey"  # the path of an evaluation set that is made, not read
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class PasskeySettings:
    """Passkey retrieval: a number is hidden in made text, and asked for at the end."""

    lengths: tuple[int, ...] = ()
    """Lengths of documents in tokens, such as 1024 4096 16384; none: no passkey retrieval."""
    depths: tuple[float, ...] = DEPTHS
    """Where in a document the number stands, from 0 (its beginning) to 1 (its end)."""
    samples: int = 4
    """Documents of each length and depth."""
    seed: int = 0
    """Of the numbers."""

    def check(self) -> None:
        """Raise DataError for what makes no documents."""
        check_passkey(self.lengths, self.depths, self.samples)


def check_passkey(lengths: Sequence[int], depths: Sequence[float], samples: int) -> None:
    """Raise DataError for lengths, depths or samples that make no documents."""
    if not lengths or not depths or samples < 1:
        raise DataError(
            f"passkey retrieval of {counted(len(lengths), 'length')}, {counted(len(depths), 'depth')} and "
            f"{counted(samples, 'sample')} has no document; give at least one of each"
        )
    if outside := [depth for depth in depths if not 0 <= depth <= 1]:
        raise DataError(
            f"passkey depths are shares of a document, from 0 (its beginning) to 1 (its end), not {outside}"
        )

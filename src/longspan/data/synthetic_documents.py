"""Documents whose token ids are computed, for probes and benches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SyntheticDocument:
    """Token ids that are a function of document and position, the same on every rank; for probes and benches.

    >>> import numpy as np
    >>> SyntheticDocument(number=0, length=4096, vocabulary=512)[np.arange(3)]
    array([ 40, 229, 114])
    """

    number: int
    length: int
    vocabulary: int
    parent: int = -1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: Any) -> np.ndarray:
        mixed = (positions + 1) * 2654435761 + (self.number + 1) * 40503  # Knuth's multipliers for hashing
        return (mixed ^ (mixed >> 13)) % self.vocabulary


def synthetic_documents(lengths: Sequence[int], vocabulary: int) -> list[SyntheticDocument]:
    """Return a document of each of these lengths, whose ids are below `vocabulary`."""
    return [SyntheticDocument(i, n, vocabulary) for i, n in enumerate(lengths)]

"""Document lengths as they come in practice, for comparing planners: drawn at random, the same for the same seed."""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError

SHORTEST = 16  # rows of a document
DRAWN = 4096  # documents at a time
DISTRIBUTIONS = ("lognorm", "bimodal", "uniform", "expo", "files")


def sample_lengths(name: str, tokens: int, *, seed: int = 0, longest: int = 131072) -> NDArray[np.int64]:
    """Draw lengths of documents until they hold at least `tokens` together (n,).

    >>> int(sample_lengths("lognorm", 100_000).sum()) >= 100_000
    True

    `lognorm` has median 2K and 1 % above 64K, `bimodal` is 90 % of 2K and 10 % of 64K, `uniform` runs from 1K to 64K,
    `expo` has mean 8K, and `files` are the sizes / 4 of this Python's own library. Raises PlanError for another name.
    """
    if name not in DISTRIBUTIONS:
        raise PlanError(f"unknown distribution {name!r}; use one of {', '.join(DISTRIBUTIONS)}")
    if tokens < 1 or longest < SHORTEST:
        raise PlanError(
            f"tokens {tokens}, shortest {SHORTEST} and longest {longest} make no documents; use at least 1"
        )
    random = np.random.default_rng(seed)
    samples = [np.zeros(0, np.int64)]
    total = 0
    while total < tokens:
        if name == "lognorm":
            # ln(64K / 2K) / 2.326, the 99 % quantile
            drawn = np.exp(np.log(2048) + 1.4898 * random.standard_normal(DRAWN))
        elif name == "bimodal":
            drawn = np.where(random.random(DRAWN) < 0.9, 2048.0, 65536.0)
        elif name == "uniform":
            drawn = random.integers(1024, 65537, DRAWN)
        elif name == "expo":
            drawn = random.exponential(8192, DRAWN)
        else:  # "files"
            drawn = random.choice(_stdlib_file_lengths(), DRAWN)
        batch = np.clip(drawn.astype(np.int64), SHORTEST, longest)
        # no further than the document with which `tokens` is reached
        batch = batch[: int(np.searchsorted(np.cumsum(batch), tokens - total)) + 1]
        samples.append(batch)
        total += int(batch.sum())
    return np.concatenate(samples)


@cache
def _stdlib_file_lengths() -> NDArray[np.float64]:
    """A quarter of the bytes of each Python file, in the order of paths; SHORTEST bytes or less are left out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    sizes = [file.stat().st_size // 4 for file in files if "site-packages" not in file.parts]
    return np.array([size for size in sizes if size > SHORTEST], np.float64)

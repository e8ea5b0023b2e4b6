"""Shuffled epochs that are computed place by place: nothing of a corpus's size is made or held.

`FirstEpochs` are those of earlier versions, which make and hold all of an epoch.
"""

import math
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROUNDS = 16  # fewer are not uniform over the permutations of 5 to 7 documents
_HALF = np.uint64(32)  # bits
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


class Shuffled(Protocol):
    """The numbers below a count in shuffled epochs, one after another without end."""

    def __getitem__(self, places: Integers, /) -> Integers:
        """What stands at these places."""
        ...


class Epochs:
    """Shuffled epochs of range(count) that follow from a seed, computed at the places that are asked for.

    >>> sorted(Epochs(5, 7)[np.arange(5)].tolist()), sorted(Epochs(5, 7)[np.arange(5, 10)].tolist())
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])

    A Feistel network over the cells of a rectangle of at least `count` cells, with keys of the epoch; a cell beyond
    `count` is walked on from until one below is found (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002:
    the generalized Feistel network and cycle walking). About one cell in sqrt(count) is beyond.
    """

    def __init__(self, count: int, *seed: int) -> None:
        self._count = count
        root = math.isqrt(max(0, count - 1)) + 1
        self._height = root + root % 2  # even: moving rows is an odd permutation too
        self._width = -(-count // self._height)
        self._keys: Words = np.random.PCG64(list(seed)).random_raw(_ROUNDS)

    def __getitem__(self, places: Integers) -> Integers:
        epochs, cells = np.divmod(places.astype(np.uint64), np.uint64(self._count))
        if (epochs == epochs[:1]).all():
            epochs = epochs[:1]
        keys = [_hashed(key + epochs * _GOLDEN) for key in self._keys]
        cells = self._permuted(cells, keys)
        while (beyond := cells >= np.uint64(self._count)).any():
            cells[beyond] = self._permuted(cells[beyond], [key if len(key) == 1 else key[beyond] for key in keys])
        return cells.astype(np.int64)

    def _permuted(self, cells: Words, keys: list[Words]) -> Words:
        """The cells of the rectangle after all rounds, each of which moves rows by columns or columns by rows."""
        width = np.uint64(self._width)
        row = cells // width
        column = cells - row * width
        for turn, key in enumerate(keys):
            if turn % 2:
                column = _moved(column, row, key, self._width)
            else:
                row = _moved(row, column, key, self._height)
        return row * width + column


def _moved(values: Words, by: Words, key: Words, size: int) -> Words:
    """(value + hash of another and a key) modulo size, for values below it."""
    moved = _hashed(by + key)
    moved >>= _HALF
    moved *= np.uint64(size)
    moved >>= _HALF
    moved += values
    moved -= (moved >= np.uint64(size)) * np.uint64(size)
    return moved


def _hashed(words: Words) -> Words:
    """The finalizer of SplitMix64, in place (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


class FirstEpochs:
    """Shuffled epochs of range(count) as earlier versions made them, which hold all of an epoch or two."""

    def __init__(self, count: int, *seed: int) -> None:
        self._count, self._seed = count, seed

    def __getitem__(self, places: Integers) -> Integers:
        epochs, numbers = np.divmod(places, self._count)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            numbers[here] = _sorted_by_bits(self._count, *self._seed, epoch)[numbers[here]]
        return numbers


@lru_cache(maxsize=2)
def _sorted_by_bits(count: int, *seed: int) -> npt.NDArray[np.integer[Any]]:
    """A permutation from the raw bits of the generator, which numpy keeps the same in every version."""
    order = np.argsort(np.random.PCG64(list(seed)).random_raw(count), kind="stable")
    return order.astype(np.int32 if count < 2**31 else np.int64)


def first_of_shuffled(count: int, most: int, *seed: int, block: int = 2**17) -> Integers:
    """The first `most` of a range(count) that is shuffled by sorting raw bits, in its order, without making all of it.

    >>> first_of_shuffled(9, 3, 0).tolist() == FirstEpochs(9)[np.arange(3)].tolist()
    True
    """
    generator = np.random.PCG64(list(seed))
    bits, ids = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    for start in range(0, count, block):
        drawn = generator.random_raw(min(block, count - start))
        among = np.flatnonzero(drawn < bits[-1]) if len(bits) == most > 0 else np.arange(len(drawn))
        bits, ids = np.concatenate([bits, drawn[among]]), np.concatenate([ids, among + start])
        smallest = np.argsort(bits, kind="stable")[:most]
        bits, ids = bits[smallest], ids[smallest]
    return ids

"""Shuffled numbers that are computed only at the places that are used: endless epochs, and a sample."""

import math

import numpy as np
import numpy.typing as npt

from longspan.layout import Integers

Words = npt.NDArray[np.uint64]
_ROUNDS = 16  # fewer are not uniform over the permutations of 5 to 7 documents
_HALF = np.uint64(32)  # bits
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


class Epochs:
    """Shuffled epochs of range(count), a function of the seed that is computed only at the places that are used.

    >>> sorted(Epochs(5, 7)[np.arange(5)].tolist()), sorted(Epochs(5, 7)[np.arange(5, 10)].tolist())
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])

    This is a Feistel network over the cells of a rectangle of at least `count` cells, with keys of the epoch. A cell
    that is not below `count` is permuted again until one below is reached (Black and Rogaway, Ciphers with Arbitrary
    Finite Domains, 2002: the generalized Feistel network and cycle walking). That is about one cell in sqrt(count).
    """

    def __init__(self, count: int, *seed: int) -> None:
        self._count = count
        root = math.isqrt(max(0, count - 1)) + 1
        # Even: shifts of a column of odd height are even permutations, of which odd ones cannot be composed.
        self._height = root + root % 2
        self._width = -(-count // self._height)
        self._keys: Words = np.random.PCG64(list(seed)).random_raw(_ROUNDS)

    def __getitem__(self, places: Integers) -> Integers:
        """Return the document (n,) at each of these places of the stream, each epoch in an order of its own."""
        epochs, cells = np.divmod(places.astype(np.uint64), np.uint64(self._count))
        # One key per round serves all places.
        if (epochs == epochs[:1]).all():
            epochs = epochs[:1]
        keys = [_hash_words(key + epochs * _GOLDEN) for key in self._keys]
        cells = self._permute_cells(cells, keys)
        while (beyond := cells >= np.uint64(self._count)).any():
            cells[beyond] = self._permute_cells(
                cells[beyond], [key if len(key) == 1 else key[beyond] for key in keys]
            )
        return cells.astype(np.int64)

    def _permute_cells(self, cells: Words, keys: list[Words]) -> Words:
        """A round moves cells to another row by their column, or to another column by their row: no two meet."""
        width = np.uint64(self._width)
        row = cells // width
        column = cells - row * width
        for turn, key in enumerate(keys):
            if turn % 2:
                column = _add_hash_modulo(column, row, key, self._width)
            else:
                row = _add_hash_modulo(row, column, key, self._height)
        return row * width + column


def _add_hash_modulo(values: Words, others: Words, key: Words, size: int) -> Words:
    """(value + hash of other + key) modulo size, for values below size; the hash is scaled to below size."""
    shifted = _hash_words(others + key)
    shifted >>= _HALF  # scaled by its upper 32 bits: times size, over 2**32
    shifted *= np.uint64(size)
    shifted >>= _HALF
    shifted += values
    shifted -= (shifted >= np.uint64(size)) * np.uint64(size)  # modulo: both terms are below size
    return shifted


def _hash_words(words: Words) -> Words:
    """SplitMix64's finalizer, in place (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def shuffled_sample(count: int, most: int, *seed: int, block: int = 2**17) -> Integers:
    """Return the first `most` numbers of range(count) shuffled by sorting raw bits, `block` numbers at a time.

    >>> bits = np.random.PCG64([0]).random_raw(9)
    >>> shuffled_sample(9, 3, 0).tolist() == np.argsort(bits)[:3].tolist()
    True
    """
    generator = np.random.PCG64(list(seed))
    bits = np.empty(0, dtype=np.uint64)
    ids = np.empty(0, dtype=np.int64)
    for start in range(0, count, block):
        new_bits = generator.random_raw(min(block, count - start))
        # Once there are `most` bits, only new ones below the largest of them can be among the smallest.
        candidates = np.flatnonzero(new_bits < bits[-1]) if len(bits) == most > 0 else np.arange(len(new_bits))
        bits = np.concatenate([bits, new_bits[candidates]])
        ids = np.concatenate([ids, candidates + start])
        smallest = np.argsort(bits, kind="stable")[:most]
        bits = bits[smallest]
        ids = ids[smallest]
    return ids

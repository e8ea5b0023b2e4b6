"""Dropout of attention weights that is the same for every degree, type, rank and recomputation; none of it is stored.

Whether a weight is kept is a hash of (seed, query head, document, query position, key position), all as in the whole
micro-batch. The hash is splitmix64's finaliser (Steele, Lea, Flood 2014), in 64-bit integers that wrap, which CPUs and
GPUs do alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.tiles import Launch, Tile

# The rate is compared with this many bits of the hash.
_BITS = 31


def _to_signed_word(word: int) -> int:
    """torch has no unsigned arithmetic."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


# words of splitmix64, signed
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Dropout:
    """Weights are zeroed with probability `rate`, in multiples of 2 ** −31, and the others divided by 1 − rate."""

    rate: float
    seed: int
    # The heads at hand begin at this one of all query heads.
    first_head: int = 0

    def factors(self, launch: Launch, tile: Tile, heads: int, dtype: torch.dtype) -> Tensor:
        """Return what each weight of a tile is multiplied by: (heads, query rows, key rows), 0 or 1 / (1 − rate)."""
        document, q_position, k_position = launch.row_identities
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        head = torch.arange(self.first_head, self.first_head + heads, device=launch.device)
        row = _absorb_word(
            _absorb_word(_absorb_word(_to_signed_word(self.seed), head)[:, None], document[rows]), q_position[rows]
        )
        word = _absorb_word(row.unsqueeze(-1), k_position[keys])  # (heads, query rows, key rows)
        is_kept = _shift_right(word, 64 - _BITS) >= round(self.rate * (1 << _BITS))
        return is_kept.to(dtype).div_(1.0 - self.rate)


def mix_seed(*words: int) -> int:
    """Hash integers, in their order, to a seed: a signed 64-bit word."""
    state = torch.zeros((), dtype=torch.int64)
    for word in words:
        state = _absorb_word(state, torch.tensor(_to_signed_word(word)))
    return int(state)


def _absorb_word(state: Tensor | int, word: Tensor) -> Tensor:
    """splitmix64's finaliser of state + (word + 1) · golden ratio; with the 1 a word of 0 changes the state."""
    x = state + (word + 1) * _GOLDEN
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """The sign bit does not spread."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)

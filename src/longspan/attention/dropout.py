"""Dropout whose mask depends on who attends to whom and on nothing else.

Whether a weight is kept is a hash of (seed, query head, document, query position, key position), all as they are in the
whole micro-batch. So the mask is the same for every degree, communication type, rank and recomputation, in forward and
in backward, and nothing of it is stored. The hash is splitmix64's finaliser (Steele, Lea, Flood 2014), in 64-bit
integers that wrap, which CPUs and GPUs do alike.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan.attention.geometry.launch import Launch
from longspan.attention.geometry.tiles import Tile

_BITS = 31  # of the hash that are compared with the rate


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


@dataclass(frozen=True)
class Dropout:
    """Weights are zeroed with probability `rate`, in multiples of 2 ** −31, and the others divided by 1 − rate."""

    rate: float
    seed: int
    first_head: int = 0  # of the tensors at hand, among all query heads

    def from_head(self, head: int) -> "Dropout":
        """The same for tensors that begin at this head of the ones at hand."""
        return replace(self, first_head=self.first_head + head)

    def factors(self, launch: Launch, tile: Tile, heads: int, dtype: torch.dtype) -> Tensor:
        """What each weight of a tile is multiplied by: (heads, query rows, key rows), 0 or 1 / (1 − rate)."""
        document, q_position, k_position = launch.tokens
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        head = torch.arange(self.first_head, self.first_head + heads, device=launch.device)
        row = _absorb(_absorb(_absorb(_signed(self.seed), head)[:, None], document[rows]), q_position[rows])
        word = _absorb(row.unsqueeze(-1), k_position[keys])  # (heads, query rows, key rows)
        is_kept = _shifted(word, 64 - _BITS) >= round(self.rate * (1 << _BITS))
        return is_kept.to(dtype).div_(1.0 - self.rate)


def mixed_seed(*words: int) -> int:
    """One seed of several integers."""
    state = torch.zeros((), dtype=torch.int64)
    for word in words:
        state = _absorb(state, torch.tensor(_signed(word)))
    return int(state)


def _absorb(state: Tensor | int, word: Tensor) -> Tensor:
    """splitmix64's finaliser of state + (word + 1) · golden ratio."""
    x = state + (word + 1) * _GOLDEN
    x.bitwise_xor_(_shifted(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shifted(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits of unsigned words: the sign bit does not spread."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)

"""Moments of AdamW in eight bits: codes of blocks of 256 numbers, in torch; the kernel's have the same bits.

A mean is kept as its share of the root of its mean square. Shares are alike in size where gradients are not, as in the
rows of an embedding, and an update, which is a share, keeps them when the square is rounded. Codes are rounded by
chance: to the nearest, a moment that moves by less than half a code a step would stay for ever.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 256  # numbers in a block, in the order of a rank's shard
# Of shares: a sign, and a level; with level² of 127² the block's largest.
LEVELS = 127
# Of squares: 255 codes, at equal steps of a float32's bits, from the block's smallest number above 0 to its largest.
SQUARE_STEPS = 254
OCTAVES = 32 << 23  # the most bits from the smallest to the largest: √v of 2^16
ALIGNMENT = 16  # bytes, of the scales behind the codes
MEAN_SCALE_BYTES = 4  # a block: the share of level 1, in float32
SQUARE_SCALE_BYTES = 8  # a block: bits of the smallest and of the largest
NEAREST = 1 << 15  # noise of sixteen bits that rounds to the nearest


def packed_bytes(numel: int, scale_bytes: int) -> int:
    """Return how many bytes the codes of so many numbers take, with the scales of their blocks behind them."""
    return _scales_offset(numel) + -(-numel // SIZE) * scale_bytes


def _scales_offset(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def split_packed(packed: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes (numel,) and the scales (blocks, …), in float32 of a mean or int32 of a square; views."""
    words = 1 if dtype == torch.float32 else 2
    return packed[:numel], packed[_scales_offset(numel) :].view(dtype).view(-(-numel // SIZE), words)


class PackedMoments:
    """A parameter's moments in eight bits, which are read and written by parts that begin with a block."""

    def __init__(self, mean: Tensor, square: Tensor, numel: int) -> None:
        self._means = split_packed(mean, numel, torch.float32)
        self._squares = split_packed(square, numel, torch.int32)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return means and squares (stop − start,), in float32."""
        blocks = slice(start // SIZE, -(-stop // SIZE))
        squares, bounds = self._squares
        means, units = self._means
        square = decode_square(squares[start:stop], bounds[blocks])
        return decode_mean(means[start:stop], units[blocks], square), square

    def write(self, start: int, stop: int, mean: Tensor, square: Tensor, noise: Sequence[Tensor]) -> None:
        """Write means and squares (stop − start,), rounded by `noise`: sixteen bits for each mean, and for each square,
        in int32.
        """
        blocks = slice(start // SIZE, -(-stop // SIZE))
        encoded = (encode_mean(mean, square, noise[0]), encode_square(square, noise[1]))
        for (codes, scales), (new_codes, new_scales) in zip((self._means, self._squares), encoded, strict=True):
            codes[start:stop] = new_codes
            scales[blocks] = new_scales


def decode_mean(codes: Tensor, scales: Tensor, square: Tensor) -> Tensor:
    """Return the numbers (n,), in float32, of codes (n,), the scales of their blocks (blocks, 1), and squares (n,)."""
    blocks = _blocks(codes).int()
    level = blocks & 127
    shares = (level * level).float() * scales
    return torch.where(blocks > 127, -shares, shares).view(-1)[: len(codes)] * nearest_root(square)


def encode_mean(mean: Tensor, square: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (n,) and scales (blocks, 1) of numbers (n,), rounded by sixteen bits of noise, int32 (n,)."""
    shares = _blocks(torch.where(square > 0, mean / nearest_root(square), 0.0))
    units = shares.abs().amax(1, keepdim=True) / LEVELS**2
    x = shares.abs() / torch.where(units > 0, units, 1.0)
    level = nearest_root(x).int()
    above = (x - level * level) / (2 * level + 1) + _blocks(noise).float() * 2.0**-16
    codes = (level + above.int()).clamp(max=LEVELS) + torch.where(shares < 0, 128, 0)
    return codes.to(torch.uint8).view(-1)[: len(mean)], units


def nearest_root(x: Tensor) -> Tensor:
    """Return the square root, rounded to the nearest number of x's dtype.

    It is computed in float64: torch's root in float32 on a CPU (MKL's) is not always the nearest.
    """
    return x.double().sqrt().to(x.dtype)


def decode_square(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers (n,), in float32, of codes (n,) and the scales of their blocks (blocks, 2), int32."""
    blocks = _blocks(codes).int()
    low, high = scales[:, :1], scales[:, 1:]
    step = (high - low).float() / SQUARE_STEPS
    bits = low + ((blocks - 1).float() * step).int()
    return torch.where(blocks > 0, torch.minimum(bits, high), 0).view(torch.float32).view(-1)[: len(codes)]


def encode_square(square: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (n,) and scales (blocks, 2) of numbers (n,) ≥ 0, rounded by noise; only 0 has code 0."""
    bits = _blocks(square).view(torch.int32)
    high = bits.amax(1, keepdim=True)
    low = torch.where(bits > 0, bits, high).amin(1, keepdim=True)
    low = torch.maximum(low, high - OCTAVES)
    per_bit = SQUARE_STEPS / torch.maximum(high - low, torch.ones_like(low)).float()
    steps = (bits - low).float() * per_bit + _blocks(noise).float() * 2.0**-16
    codes = torch.where(bits > 0, steps.clamp(0.0, float(SQUARE_STEPS)).int() + 1, 0)
    return codes.to(torch.uint8).view(-1)[: len(square)], torch.cat([low, high], 1)


def _blocks(x: Tensor) -> Tensor:
    """Numbers (n,) become (blocks, 256), the last block filled with zeros."""
    return F.pad(x, (0, -len(x) % SIZE)).view(-1, SIZE)

"""Moments of AdamW in eight bits: codes of blocks of 256 numbers, in torch; the kernel's have the same bits.

A code is the upper bits of a float32, taken from the block's range, so that all of it is arithmetic of integers. Codes
are rounded by chance: to the nearest, a moment that moves by less than half a code a step would stay for ever.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 256  # numbers in a block, in the order of a rank's shard
# Of means: a sign, and 127 codes of three mantissa bits up to the block's largest; smaller than 2^-15.75 of it is 0.
MEAN_SHIFT = 20
MEAN_BASE = 889  # the upper bits of 1.0, less 127
# Of squares: 255 codes, at equal steps of a float32's bits, from the block's smallest number above 0 to its largest.
SQUARE_STEPS = 254
OCTAVES = 32 << 23  # the most bits from the smallest to the largest: √v of 2^16
ALIGNMENT = 16  # bytes, of the scales behind the codes
MEAN_SCALE_BYTES = 4  # a block: the largest, in float32
SQUARE_SCALE_BYTES = 8  # a block: bits of the smallest and of the largest
NEAREST = 1 << 15  # noise of sixteen bits that rounds to the nearest


def packed_bytes(numel: int, scale_bytes: int) -> int:
    """Return how many bytes the codes of so many numbers take, with the scales of their blocks behind them."""
    return _aligned(numel) + -(-numel // SIZE) * scale_bytes


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def split_packed(packed: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes (numel,) and the scales (blocks, …), in float32 of a mean or int32 of a square; views."""
    words = 1 if dtype == torch.float32 else 2
    return packed[:numel], packed[_aligned(numel) :].view(dtype).view(-(-numel // SIZE), words)


def decode_mean(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers (n,), in float32, of codes (n,) and the scales of their blocks (blocks, 1)."""
    blocks = _blocks(codes).int()
    level = blocks & 127
    magnitude = torch.where(level > 0, (level + MEAN_BASE) << MEAN_SHIFT, 0).view(torch.float32) * scales
    return torch.where(blocks > 127, -magnitude, magnitude).view(-1)[: len(codes)]


def encode_mean(mean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (n,) and scales (blocks, 1) of numbers (n,), rounded by sixteen bits of noise, int32 (n,)."""
    blocks = _blocks(mean)
    largest = blocks.abs().amax(1, keepdim=True)
    shares = blocks.abs() / torch.where(largest > 0, largest, 1.0)
    levels = ((shares.view(torch.int32) + (_blocks(noise) << 4)) >> MEAN_SHIFT) - MEAN_BASE
    codes = levels.clamp(0, 127) + torch.where(blocks < 0, 128, 0)
    return codes.to(torch.uint8).view(-1)[: len(mean)], largest


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
    return F.pad(x, (0, -len(x) % SIZE)).view(-1, SIZE)

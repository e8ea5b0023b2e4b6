"""Stochastic rounding to bfloat16 by counted random bits.

A number's random bits are a hash of its place in the whole parameter, so that sharding and device do not change them.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.model.weights.local_tensors import LocalPart

# factors of a place's low and high word
GOLDEN = 0x9E3779B9
FAR = 0x85EBCA6B
# These belong to hash-prospector's hash of least bias, with shifts of 16, 15 and 15.
FIRST = 0x21F0AAAD
SECOND = 0xD35A2D97
THIRD = 0xB5297A4D
WORD = (1 << 32) - 1  # mask of 32 bits
NOISE_BITS = 16  # random bits that round one number
STREAMS = 3  # numbers at one place: of a parameter and of both moments
_KEY = struct.Struct("<2I")  # the two words of a key in a digest


class RandomKey(NamedTuple):
    """Two words of 32 bits from which a parameter's random bits follow in one update."""

    first: int
    second: int

    @classmethod
    def from_source(cls, *source: object) -> "RandomKey":
        """Return the key of some values, by a digest of their text: the same on every rank and in every run."""
        return cls(*_KEY.unpack(hashlib.blake2b(repr(source).encode(), digest_size=_KEY.size).digest()))


class Places(NamedTuple):
    """Where the numbers of a block, such as a rank's shard, are among the numbers of the whole parameter.

    `inner` numbers lie next to each other in the whole; such rows are `near` numbers apart, and groups of `rows` of
    them `far` apart. A part of a block begins at its number `start`. With j = i + `start`, number i is number
    `offset` + j // inner // rows · far + j // inner % rows · near + j % inner of the whole.
    """

    offset: int
    inner: int
    rows: int
    near: int
    far: int
    start: int = 0

    @property
    def is_flat(self) -> bool:
        """Whether neighbours in the block are neighbours in the whole, from its first to its last number."""
        return not (self.near or self.far)

    @classmethod
    def from_block(cls, shape: Sequence[int], block: Sequence[slice]) -> "Places":
        """Return the places of a block of a tensor of this shape: a slice for each dim.

        `levels` are (count, stride), from the last dim to the first. A dim joins the level before if all dims of that
        level are whole; otherwise it begins a new level. A dim of which the block has one index adds to the offset
        only. A tensor that is cut along two dims has three levels at most.

        >>> Places.from_block((4, 6), (slice(2, 4), slice(3, 6)))
        Places(offset=15, inner=3, rows=2, near=6, far=0, start=0)
        """
        offset = 0
        stride = 1
        levels = [(1, 1)]
        for size, part in zip(reversed(shape), reversed(block), strict=True):
            count = part.stop - part.start
            level_count, level_stride = levels[-1]
            offset += part.start * stride
            if count != 1:
                if level_count * level_stride == stride:
                    levels[-1] = level_count * count, level_stride
                else:
                    levels.append((count, stride))
            stride *= size
        assert len(levels) <= 3, f"a block {block} of {shape} is cut along too many dims"
        (inner, _), (rows, near), (_, far) = [*levels, (1, 0), (1, 0)][:3]
        return cls(offset, max(inner, 1), max(rows, 1), near, far)  # divisors: 1 for an empty block

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the places of numbers `start` to `stop` of the block, (stop − start,) in int64."""
        j = torch.arange(self.start + start, self.start + stop, device=device)
        if self.is_flat:
            return j + self.offset
        row = j // self.inner
        return self.offset + row // self.rows * self.far + row % self.rows * self.near + j % self.inner


class RoundingBits:
    """The keys and places of a model's parameters: from the world's seed and step, and each parameter's name.

    A resumed run repeats them, and ranks that hold the same numbers draw the same. A second update of a parameter
    within a step has another key: updates are counted.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        """Note the names of a prepared model's parameters, which decide their bits together with the world's seed and
        step.
        """
        self._world = world
        # Copies on several pipeline stages have one name.
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._step = -1
        self.draws: Counter[nn.Parameter] = (
            Counter()
        )  # updates of each in this step, whose next one has another key
        self._places = dict[nn.Parameter, Places]()

    def key(self, parameter: nn.Parameter) -> RandomKey:
        """Return the key of the parameter's next update; in a new step of the world, updates are counted from 0."""
        if self._world.step != self._step:
            self.restart_counts()
        name = self._names.get(parameter, "")
        return RandomKey.from_source(self._world.seed, self._step, self.draws[parameter], name)

    def restart_counts(self) -> None:
        """Let the next update draw the bits of the first update of its step."""
        self._step = self._world.step
        self.draws = Counter()

    def places(self, parameter: nn.Parameter) -> Places:
        """Return where this rank's numbers of a parameter are in the whole one; kept after the first call."""
        places = self._places.get(parameter)
        if places is None:
            places = self._places[parameter] = Places.from_block(
                parameter.shape, LocalPart.from_parameter(parameter).block
            )
        return places


def random_words(key: RandomKey, places: Tensor) -> Tensor:
    """Return a word of 32 random bits for each place, as int64 of the same shape.

    The first word of the key moves the sequence of the places' low words. The second one, and the high word of a place,
    are mixed in before two rounds of multiplication, so that no two keys give one sequence at different places.
    """
    word = (places * GOLDEN + key.first) & WORD
    word = word ^ (word >> 16) ^ (((places >> 32) * FAR + key.second) & WORD)
    word = word * FIRST & WORD
    word = (word ^ (word >> 15)) * SECOND & WORD
    return word ^ (word >> 15)


def rounding_noise(words: Tensor, stream: int) -> Tensor:
    """Return the sixteen bits of each place that round this stream's numbers: of the parameter (0) or of a moment.

    Two streams are the halves of the word; the third is the upper half of its product with an odd number.
    """
    assert 0 <= stream < STREAMS, stream
    if stream == 2:
        words = words * THIRD & WORD
    return (words & 0xFFFF if stream == 0 else words >> NOISE_BITS).to(torch.int32)


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """Round a float32 tensor to bfloat16: each number to one of its two neighbours, so that the mean is the number.

    `noise` is an int32 tensor of sixteen random bits, which are added to those that bfloat16 lacks; what carries over
    rounds away from zero. What is not finite stays.
    """
    rounded = ((x.view(torch.int32) + noise) & -(1 << NOISE_BITS)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)

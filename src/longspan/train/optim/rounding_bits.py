"""Random bits of stochastic rounding, counted: each number's bits are a hash of where it is in the whole parameter.

So they do not depend on how a parameter is sharded, nor on the device: a tensor on one GPU, its shards on eight and a
CPU round alike. `adamw_kernels.py` computes the same in Triton. All arithmetic is on words of 32 bits, of which GPUs
multiply one in an instruction: a hash takes about a dozen.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.model.weights.local_tensors import LocalPart, local_tensor

GOLDEN, FAR = 0x9E3779B9, 0x85EBCA6B  # factors of a place's low and high word
FIRST, SECOND = 0x21F0AAAD, 0xD35A2D97  # of hash-prospector's hash of least bias, with shifts of 16, 15 and 15
THIRD = 0xB5297A4D  # of the third stream
WORD = (1 << 32) - 1  # mask of 32 bits
NOISE_BITS, STREAMS = 16, 3  # random bits that round one number; a parameter and both moments are rounded


_KEY = struct.Struct("<2I")  # the two words of a key in a digest


class Key(NamedTuple):
    """Two words of 32 bits from which a parameter's random bits follow in one update."""

    first: int
    second: int


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
    def of(cls, shape: Sequence[int], block: Sequence[slice]) -> "Places":
        """Return the places of a block of a tensor of this shape: a slice for each dim.

        `levels` are (count, stride), from the last dim to the first. A dim joins the level before if all dims of that
        level are whole; otherwise it begins a new level. A dim of which the block has one index adds to the offset
        only. A tensor that is cut along two dims has three levels at most.

        >>> Places.of((4, 6), (slice(2, 4), slice(3, 6)))
        Places(offset=15, inner=3, rows=2, near=6, far=0, start=0)
        """
        offset, stride, levels = 0, 1, [(1, 1)]
        for size, part in zip(reversed(shape), reversed(block), strict=True):
            count, (level_count, level_stride) = part.stop - part.start, levels[-1]
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
        """Take the parameters' names, and the world whose step is read at each update."""
        self._world = world
        # Copies on several pipeline stages have one name.
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._step, self._draws = -1, Counter[nn.Parameter]()
        self._places = dict[nn.Parameter, Places]()

    def key(self, parameter: nn.Parameter) -> Key:
        """Return the key of the parameter's next update; in a new step of the world, updates are counted from 0."""
        if self._world.step != self._step:
            self.restart()
        source = self._world.seed, self._step, self._draws[parameter], self._names.get(parameter, "")
        return Key(*_KEY.unpack(hashlib.blake2b(repr(source).encode(), digest_size=_KEY.size).digest()))

    def count_update(self, parameter: nn.Parameter, by: int = 1) -> None:
        """Count an update of the parameter, so that its next one in this step has another key; −1 takes one back."""
        self._draws[parameter] += by

    def restart(self) -> None:
        """Let the next update draw the bits of the first update of its step."""
        self._step, self._draws = self._world.step, Counter()

    def places(self, parameter: nn.Parameter) -> Places:
        """Return where this rank's numbers of a parameter are in the whole."""
        places = self._places.get(parameter)
        if places is None:
            places = self._places[parameter] = Places.of(parameter.shape, LocalPart.of(parameter).block)
        return places


def chunk_numbers(device: torch.device) -> int:
    """Return how many numbers are worked on at a time: on a CPU as many as its caches hold."""
    return 1 << 15 if device.type == "cpu" else 1 << 24


def random_words(key: Key, places: Tensor) -> Tensor:
    """Return a word of 32 random bits for each place, as int64 of the same shape.

    The first word of the key moves the sequence of the places' low words. The second one, and the high word of a place,
    are mixed in before two rounds of multiplication, so that no two keys give one sequence at different places.
    """
    word = (places * GOLDEN + key.first) & WORD
    word = word ^ (word >> 16) ^ (((places >> 32) * FAR + key.second) & WORD)
    word = word * FIRST & WORD
    word = (word ^ (word >> 15)) * SECOND & WORD
    return word ^ (word >> 15)


def noise_of(words: Tensor, stream: int) -> Tensor:
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


def round_by_places(x: Tensor, key: Key, places: Places, stream: int) -> Tensor:
    """Round the block of a parameter, or of a moment, to bfloat16 by the bits of its places; a DTensor stays one."""
    rounded, local = x.to(torch.bfloat16), local_tensor(x)
    flat, result = local.contiguous().view(-1), torch.empty_like(local_tensor(rounded)).view(-1)
    # One word per number serves STREAMS streams; an optimizer with more states draws further words by other keys.
    key = Key(key.first, (key.second + stream // STREAMS * GOLDEN) & WORD)
    chunk = chunk_numbers(flat.device)
    for start in range(0, len(flat), chunk):
        stop = min(start + chunk, len(flat))
        words = random_words(key, places.indices(start, stop, flat.device))
        result[start:stop] = round_stochastically(flat[start:stop], noise_of(words, stream % STREAMS))
    local_tensor(rounded).copy_(result.view(local.shape))
    return rounded

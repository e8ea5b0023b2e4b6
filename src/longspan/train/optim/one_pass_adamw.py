"""AdamW in one pass over parameters, gradients and moments, and stochastic rounding by counted random bits.

On GPUs a Triton kernel updates many tensors in one launch; elsewhere torch does the same operations with the same bits.
A number's random bits are a hash of its place in the whole parameter, so that sharding and device do not change them.
"""

import hashlib
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from longspan.comm import World, to_device
from longspan.errors import ModelError
from longspan.model.weights.local_tensors import LocalPart, local_tensor
from longspan.train.optim.moment_codes import PackedMoments, nearest_root

# factors of a place's low and high word
GOLDEN = 0x9E3779B9
FAR = 0x85EBCA6B
# of hash-prospector's hash of least bias, with shifts of 16, 15 and 15
FIRST = 0x21F0AAAD
SECOND = 0xD35A2D97
THIRD = 0xB5297A4D  # of the third stream
WORD = (1 << 32) - 1  # mask of 32 bits
# random bits that round one number; a parameter and both moments are rounded
NOISE_BITS = 16
STREAMS = 3


_KEY = struct.Struct("<2I")  # the two words of a key in a digest


class RandomKey(NamedTuple):
    """Two words of 32 bits from which a parameter's random bits follow in one update."""

    first: int
    second: int

    @classmethod
    def from_source(cls, *source: object) -> "RandomKey":
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
        self._world = world
        # Copies on several pipeline stages have one name.
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._step = -1
        self.draws = Counter[nn.Parameter]()  # updates of each in this step, whose next one has another key
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
        places = self._places.get(parameter)
        if places is None:
            places = self._places[parameter] = Places.from_block(
                parameter.shape, LocalPart.from_parameter(parameter).block
            )
        return places


def numbers_per_chunk(device: torch.device) -> int:
    """Return how many numbers are worked on at a time: on a CPU as many as its caches hold."""
    return 1 << 15 if device.type == "cpu" else 1 << 24


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


# numbers that a program updates at a time, by so many warps
BLOCK = 1024
WARPS = 4
PROGRAMS = 2112  # of the largest tensor: sixteen on each of an H200's multiprocessors
ALIGNMENT = 16  # bytes that one load of a thread takes
COLUMNS = 20  # columns of the table, of eight bytes each: as in adamw_kernels.py
# addresses, count, key and places, the key and first place of moments; from the column FACTORS on, factors
_ROW = Struct("=16q8f")
_NEAREST = (0,) * 8  # in place of a key (2) and places (6), where numbers are rounded to the nearest
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.uint8: "uint8"}


class Factors(NamedTuple):
    """What the numbers of a parameter are multiplied with in one update, in the order of the kernel's table."""

    decay: float  # 1 − lr · weight decay
    mean_weight: float  # 1 − β₁
    square_decay: float  # β₂
    square_weight: float  # 1 − β₂
    root_scale: float  # 1 / √(1 − β₂ᵗ)
    eps: float
    rate: float  # lr / (1 − β₁ᵗ)
    sign: float  # of gradients: −1 to maximize

    @classmethod
    def from_parameter_group(cls, group: Mapping[str, Any], step: float) -> "Factors":
        """Bias corrections are in `rate` and `root_scale`, so that the kernel computes no powers of β."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        return cls(
            decay=1 - lr * group["weight_decay"],
            mean_weight=1 - beta1,
            square_decay=beta2,
            square_weight=1 - beta2,
            root_scale=1 / math.sqrt(1 - beta2**step),
            eps=group["eps"],
            rate=lr / (1 - beta1**step),
            sign=-1.0 if group["maximize"] else 1.0,
        )


class Update(NamedTuple):
    """One parameter's update: local tensors of one shape, and the key and places by which it is rounded, if it is.

    With `moments_rounding`, the key and the first place by which they are rounded, moments are packed in eight bits
    (moment_codes.py).
    """

    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    factors: Factors
    key: RandomKey | None = None
    places: Places | None = None
    moments_rounding: tuple[RandomKey, int] | None = None


def kernel_supports(update: Update) -> bool:
    """Return whether the kernel updates these tensors: contiguous ones of a GPU, in float32 or bfloat16.

    `places` may only have rows of fewer than 2³¹ numbers, as the kernel divides by their length in 32 bits.
    """
    parameter, gradient, mean, square = tensors = update[:4]
    return (
        on_gpu(parameter)
        and all(tensor.dtype in _DTYPES and tensor.is_contiguous() for tensor in tensors)
        and mean.dtype == square.dtype
        and parameter.shape == gradient.shape
        and (update.places is None or update.places.is_flat or update.places.inner < 1 << 31)
        and _kernels() is not None
    )


def on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def launch_update_kernels(updates: Sequence[Update], scale: Tensor | None) -> int:
    """Update all these tensors of one GPU; returns the number of launches, one for each kind of tensors.

    The kernel is compiled for types, alignment, rounding and kind of places; factors and addresses are in its table.
    """
    by_launch = defaultdict[Any, list[Update]](list)
    for update in updates:
        aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in update[:4])
        dtypes = tuple(tensor.dtype for tensor in update[:3])
        flat = update.places is None or update.places.is_flat
        by_launch[dtypes, aligned, update.key is not None, flat].append(update)
    for (dtypes, aligned, by_chance, flat), alike in by_launch.items():
        first = alike[0].parameter
        blocks = -(-max(update.parameter.numel() for update in alike) // BLOCK)
        _kernels().adamw_kernel[min(blocks, PROGRAMS), len(alike)](
            to_device(kernel_table(alike), first.device),
            scale,
            *(getattr(import_module("triton.language"), _DTYPES[dtype]) for dtype in dtypes),
            SCALED=scale is not None,
            BY_CHANCE=by_chance,
            FLAT=flat,
            ALIGNMENT=ALIGNMENT if aligned else 2,
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,  # the same bits as the reference, which rounds every product
            enable_reflect_ftz=False,
        )
    return len(by_launch)


def kernel_table(updates: Sequence[Update]) -> Any:
    """Return the kernel's table (tensors, COLUMNS) of int64, whose last columns are pairs of factors in float32."""
    table = bytearray(_ROW.size * len(updates))
    for row, update in enumerate(updates):
        rounding = (
            (*update.key, *update.places) if update.key is not None and update.places is not None else _NEAREST
        )
        addresses = [tensor.data_ptr() for tensor in update[:4]]
        key, first = update.moments_rounding or ((0, 0), 0)
        numbers = (update.parameter.numel(), *rounding, *key, first)
        _ROW.pack_into(table, _ROW.size * row, *addresses, *numbers, *update.factors)
    return np.frombuffer(table, np.int64).reshape(len(updates), COLUMNS)


@cache
def _kernels() -> Any:
    return None if find_spec("triton") is None else import_module("longspan.train.optim.adamw_kernels")


class ParameterPart(NamedTuple):
    """What a stand-in is updated for: numbers of a parameter from `start`; `key` rounds them, None to the nearest."""

    parameter: nn.Parameter
    start: int
    key: RandomKey | None


class OnePassAdamW(AdamW):
    """AdamW with one read and one write of every tensor.

    >>> optimizer = OnePassAdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))

    Parameters and moments are in one type, float32, bfloat16 or float64; arithmetic is in float32 (in float64 for
    float64). With `rounding`, those in bfloat16 are rounded by chance, otherwise to the nearest. Counts of steps are on
    the host. `gradient_scale`, a float32 number on the device, multiplies gradients within the update and leaves
    `.grad` as it is; a scale that is not a number leaves parameters and moments as they are.

    Raises ModelError for gradients that are sparse or complex.
    """

    gradient_scale: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        rounding: RoundingBits | None = None,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=False
        )
        self._rounding, self._parts = rounding, dict[nn.Parameter, ParameterPart]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; returns what `closure` returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        factors = dict[Any, Factors]()
        updates = list[Update]()
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None or group.get("is_matrix"):
                    continue
                count = self._count_step(parameter)
                if (index, count) not in factors:
                    factors[index, count] = Factors.from_parameter_group(group, count)
                updates.append(self._make_update(parameter, factors[index, count]))
        self.apply(updates)
        return loss

    def apply(self, updates: Sequence[Update]) -> None:
        """Make the updates of a step; Muon, whose groups with `is_matrix` have none here, makes its own besides."""
        apply_updates(updates, self.gradient_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; the next update draws the random bits of the first update of its step."""
        super().load_state_dict(state_dict)
        if self._rounding is not None:
            self._rounding.restart_counts()

    @contextmanager
    def use_stand_ins(self, parts: dict[nn.Parameter, ParameterPart], scale: Tensor | None) -> Iterator[None]:
        """Let the keys of `parts` stand in for parts of parameters, with keys of `draw_key`, under this scale."""
        scale_now = self.gradient_scale
        self._parts = parts
        self.gradient_scale = scale
        try:
            yield
        finally:
            self._parts = {}
            self.gradient_scale = scale_now

    def draw_key(self, parameter: nn.Parameter) -> RandomKey | None:
        """Return the key by which this update rounds a parameter, and count the update; None: to the nearest."""
        if self._rounding is None or parameter.dtype != torch.bfloat16:
            return None
        key = self._rounding.key(parameter)
        self._rounding.draws[parameter] += 1
        return key

    def take_back_counts(self, state: Mapping[Any, dict[str, Any]] | None = None) -> None:
        """Count the last step as not taken: its scale was not a number and nothing changed, or it only made states.

        `state` has the counts if they are not in this optimizer's own state, as with states on the host.
        """
        state = self.state if state is None else state
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and "step" in state[parameter]:
                    state[parameter]["step"] -= 1
                    if self._rounding is not None:
                        self._rounding.draws[parameter] -= 1

    def _count_step(self, parameter: nn.Parameter) -> float:
        """The count is kept on the CPU, also of states that torch's fused AdamW saved: no step waits for a GPU."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse or not parameter.is_floating_point():
            raise ModelError(
                f"AdamW in one pass was given a parameter {tuple(parameter.shape)} in {parameter.dtype} with a "
                f"gradient of layout {parameter.grad.layout}; it takes dense real ones: set sparse=False of the "
                "embedding, or use another optimizer.class"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if state["step"].device.type != "cpu":  # torch's fused AdamW, which saved it, counts on the GPU
            state["step"] = state["step"].cpu()
        state["step"] += 1
        return state["step"].item()

    def _make_update(self, parameter: nn.Parameter, factors: Factors) -> Update:
        """A part takes the whole parameter's key, and places from its start."""
        assert parameter.grad is not None
        state = self.state[parameter]
        mean = local_tensor(state["exp_avg"])
        square = local_tensor(state["exp_avg_sq"])
        update = Update(local_tensor(parameter.detach()), local_tensor(parameter.grad), mean, square, factors)
        part = self._parts.get(parameter) or ParameterPart(parameter, 0, self.draw_key(parameter))
        if self._rounding is None or part.key is None:
            return update
        places = self._rounding.places(part.parameter)
        return Update(*update[:5], part.key, places._replace(start=part.start) if part.start else places)


def apply_updates(updates: Sequence[Update], scale: Tensor | None) -> None:
    """Update all parameters and moments: on a GPU in a few launches, elsewhere one after another.

    Versions are raised by hand, for autograd does not see what the kernel writes.
    """
    of_kernel = list[Update]()
    others = list[Update]()
    for update in updates:
        if update.parameter.numel():
            (of_kernel if kernel_supports(update) else others).append(update)
    launch_update_kernels(of_kernel, scale)
    # A scale that is not a number changes nothing; the kernel sees to that itself.
    if others and (scale is None or not bool(scale.isnan())):
        for update in others:
            apply_update_by_torch(update, scale)
    torch.autograd.graph.increment_version([tensor for u in updates for tensor in (u.parameter, u.mean, u.square)])


def apply_update_by_torch(update: Update, scale: Tensor | None = None) -> None:
    """Update one parameter and its moments by operations of torch: the reference of the kernel, in bounded chunks.

    With a key, bfloat16 results are rounded by random words that a number's place in the whole tensor gives.
    """
    tensors = (update.parameter, update.gradient, update.mean, update.square)
    packed = (
        PackedMoments(update.mean, update.square, update.parameter.numel()) if update.moments_rounding else None
    )
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    wide = torch.float64 if update.parameter.dtype == torch.float64 else torch.float32
    scale = None if scale is None else scale.to(wide)
    chunk = numbers_per_chunk(flat[0].device)
    for start in range(0, len(flat[0]), chunk):
        stop = min(start + chunk, len(flat[0]))
        outputs = [flat[0][start:stop], flat[2][start:stop], flat[3][start:stop]]  # all but the gradient
        inputs = [tensor[start:stop].to(wide) for tensor in flat]
        if packed is not None:
            inputs[2:] = packed.read(start, stop)
        results = _compute_update(inputs, update.factors, scale)
        if update.key is not None and update.places is not None:
            words = random_words(update.key, update.places.indices(start, stop, flat[0].device))
            results = [
                round_stochastically(result, rounding_noise(words, stream))
                if output.dtype == torch.bfloat16
                else result
                for stream, (output, result) in enumerate(zip(outputs, results, strict=True))
            ]
        if packed is not None and update.moments_rounding is not None:
            key, first = update.moments_rounding
            words = random_words(key, first + torch.arange(start, stop, device=flat[0].device))
            noise = [rounding_noise(words, stream) for stream in (0, 1)]
            packed.write(start, stop, results[1], results[2], noise)
            outputs = outputs[:1]
            results = results[:1]
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)
    for tensor, result in zip(tensors, flat, strict=True):
        if tensor is not update.gradient and not tensor.is_contiguous():
            tensor.copy_(result.view(tensor.shape))


def _compute_update(tensors: Sequence[Tensor], factors: Factors, scale: Tensor | None) -> list[Tensor]:
    """Compute a parameter and its moments after an update; every operation rounds once, as the kernel's do."""
    parameter, gradient, mean, square = tensors
    if scale is not None:
        gradient = gradient * scale
    gradient = gradient * factors.sign
    mean = mean + (gradient - mean) * factors.mean_weight
    square = square * factors.square_decay + gradient * gradient * factors.square_weight
    denominator = nearest_root(square) * factors.root_scale + factors.eps
    return [parameter * factors.decay - mean / denominator * factors.rate, mean, square]

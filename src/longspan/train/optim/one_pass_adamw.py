"""AdamW in one pass over parameters, gradients and moments, rounded by chance in the same pass if asked for.

On GPUs a Triton kernel updates many tensors in one launch; elsewhere, and for what it does not take (float64, tensors
that are not contiguous), the same operations run one after another in torch, with the same bits: each rounds once, and
nothing is contracted. The kernel takes no step where the gradients' scale is not a number, so that the host need not
know the norm before it launches an update.

amsgrad and optimizers other than AdamW are torch's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from longspan.errors import ModelError
from longspan.model.weights.local_tensors import local_tensor
from longspan.train.optim.adamw_launch import Factors, Update, kernel_takes, launch_updates
from longspan.train.optim.rounding_bits import (
    RoundingBits,
    chunk_numbers,
    noise_of,
    random_words,
    round_stochastically,
)


class _Part(NamedTuple):
    """The part of a parameter that a stand-in is updated for: numbers of its local tensor from `start` on.

    `last`: no part of this parameter is updated after it.
    """

    parameter: nn.Parameter
    start: int
    last: bool


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
        """Take torch's settings of AdamW; `foreach` is off, as `step` here replaces torch's."""
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=False
        )
        self._rounding, self._parts = rounding, dict[nn.Parameter, _Part]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; returns what `closure` returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        factors, updates = dict[Any, Factors](), list[Update]()
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                count = self._count_step(parameter)
                if (index, count) not in factors:
                    factors[index, count] = Factors.of(group, count)
                updates.append(self._make_update(parameter, factors[index, count]))
        apply_updates(updates, self.gradient_scale)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; the next update draws the random bits of the first update of its step."""
        super().load_state_dict(state_dict)
        if self._rounding is not None:
            self._rounding.restart()

    @contextmanager
    def use_stand_ins(self, parts: Mapping[nn.Parameter, tuple[nn.Parameter, int, bool]]) -> Iterator[None]:
        """Let the keys of `parts` stand in for parts of parameters: (parameter, start, last), as `_Part` has them."""
        self._parts = {stand_in: _Part(*part) for stand_in, part in parts.items()}
        try:
            yield
        finally:
            self._parts = {}

    def take_back_counts(self, state: Mapping[Any, dict[str, Any]] | None = None) -> None:
        """Count the last step as not taken: its scale was not a number and nothing changed, or it only made states.

        `state` has the counts if they are not in this optimizer's own state, as with states on the host.
        """
        state = self.state if state is None else state
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state[parameter]["step"] -= 1
                    if self._rounding is not None:
                        self._rounding.count_update(parameter, -1)

    def _count_step(self, parameter: nn.Parameter) -> float:
        """Count one more step of a parameter, and make moments of zeros if it is the first; returns the count.

        The count is kept on the CPU, also of states that torch's fused AdamW saved, so that no step waits for a GPU.
        """
        assert parameter.grad is not None
        if parameter.grad.is_sparse or not parameter.is_floating_point():
            raise ModelError(
                f"AdamW in one pass was given a parameter {tuple(parameter.shape)} in {parameter.dtype} with a "
                f"gradient of layout {parameter.grad.layout}; it takes dense real ones: set sparse=False of the "
                "embedding, or use another train.optimizer"
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
        """Return what an update of a parameter reads and writes; with stochastic rounding also its random bits.

        A part of a large parameter is updated as a parameter: it takes the whole one's key, and places from its start
        on, and the last part counts the update.
        """
        assert parameter.grad is not None
        state = self.state[parameter]
        mean, square = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        update = Update(local_tensor(parameter.detach()), local_tensor(parameter.grad), mean, square, factors)
        if self._rounding is None or parameter.dtype != torch.bfloat16:
            return update
        part = self._parts.get(parameter, _Part(parameter, 0, True))
        places = self._rounding.places(part.parameter)
        places = places._replace(start=part.start) if part.start else places
        update = Update(*update[:5], self._rounding.key(part.parameter), places)
        if part.last:
            self._rounding.count_update(part.parameter)
        return update


def apply_updates(updates: Sequence[Update], scale: Tensor | None) -> None:
    """Update all parameters and moments: on a GPU in a few launches, elsewhere one after another.

    Versions are raised by hand, for autograd does not see what the kernel writes.
    """
    of_kernel, others = list[Update](), list[Update]()
    for update in updates:
        if update.parameter.numel():
            (of_kernel if kernel_takes(update) else others).append(update)
    launch_updates(of_kernel, scale)
    # A scale that is not a number changes nothing; the kernel sees to that itself.
    if others and (scale is None or not bool(scale.isnan())):
        for update in others:
            apply_by_torch(update, scale)
    torch.autograd.graph.increment_version([tensor for u in updates for tensor in (u.parameter, u.mean, u.square)])


def apply_by_torch(update: Update, scale: Tensor | None = None) -> None:
    """Update one parameter and its moments by operations of torch: the reference of the kernel.

    It goes through the numbers in chunks, in float32 (float64 for float64), which bounds what it allocates. With a key,
    bfloat16 results are rounded stochastically, by random words that a number's place in the whole tensor gives.
    Tensors that are not contiguous are updated as a contiguous copy, which is copied back at the end.
    """
    tensors = (update.parameter, update.gradient, update.mean, update.square)
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    wide = torch.float64 if update.parameter.dtype == torch.float64 else torch.float32
    scale = None if scale is None else scale.to(wide)
    chunk = chunk_numbers(flat[0].device)
    for start in range(0, len(flat[0]), chunk):
        stop = min(start + chunk, len(flat[0]))
        outputs = [flat[0][start:stop], flat[2][start:stop], flat[3][start:stop]]  # all but the gradient
        results = _compute_update([tensor[start:stop].to(wide) for tensor in flat], update.factors, scale)
        if update.key is not None and update.places is not None:
            words = random_words(update.key, update.places.indices(start, stop, flat[0].device))
            results = [
                round_stochastically(result, noise_of(words, stream)) if output.dtype == torch.bfloat16 else result
                for stream, (output, result) in enumerate(zip(outputs, results, strict=True))
            ]
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
    # torch's float32 root on a CPU (MKL's) is not always the nearest number; from float64 it is.
    denominator = square.double().sqrt().to(square.dtype) * factors.root_scale + factors.eps
    return [parameter * factors.decay - mean / denominator * factors.rate, mean, square]

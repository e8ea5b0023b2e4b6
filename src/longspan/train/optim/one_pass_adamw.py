"""The optimizer AdamW in one pass over parameters, gradients and moments: which updates a step makes.

`adamw_updates.py` makes them, and `stochastic_rounding.py` has the random bits by which they are rounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from longspan.errors import ModelError
from longspan.model.weights.local_tensors import local_tensor
from longspan.train.optim.adamw_updates import Factors, Update, apply_updates
from longspan.train.optim.stochastic_rounding import RandomKey, RoundingBits


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
        """Take parameters or groups of them, with torch's arguments; `rounding` draws the bits of
        stochastic rounding.
        """
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=False
        )
        self._rounding = rounding
        # The key is a stand-in, while `use_stand_ins` is entered.
        self._parts = dict[nn.Parameter, ParameterPart]()

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
                count = self._make_states_and_count_step(parameter)
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
        """Have `step` update parts of parameters, inside: the keys of `parts` stand in for them, under this scale.

        The parts bring random keys that `draw_key` gave; the caller puts the stand-ins into the groups.
        """
        scale_now = self.gradient_scale
        self._parts = parts
        self.gradient_scale = scale
        try:
            yield
        finally:
            self._parts = {}
            self.gradient_scale = scale_now

    def draw_key(self, parameter: nn.Parameter) -> RandomKey | None:
        """Return the key by which an update rounds a parameter, and count that update; None, without counting, where
        it rounds to the nearest.
        """
        if self._rounding is None or parameter.dtype != torch.bfloat16:
            return None
        key = self._rounding.key(parameter)
        self._rounding.draws[parameter] += 1
        return key

    def undo_step_counts(self, state: Mapping[Any, dict[str, Any]] | None = None) -> None:
        """Count the last step as not taken: its scale was not a number and nothing changed, or it only made states.

        Counts of steps go down in `state` (None: this optimizer's own), and counts of drawn keys with them. Gradients
        are those of that step, by which it is known which parameters it counted.
        """
        state = self.state if state is None else state
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and "step" in state[parameter]:
                    state[parameter]["step"] -= 1
                    if self._rounding is not None:
                        self._rounding.draws[parameter] -= 1

    def _make_states_and_count_step(self, parameter: nn.Parameter) -> float:
        """torch's fused AdamW saves counts on the GPU, which are brought to the host: no step waits for a GPU."""
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
        """A part, which a stand-in is for, takes the whole parameter's key, and places from its start."""
        assert parameter.grad is not None
        state = self.state[parameter]
        mean = local_tensor(state["exp_avg"])
        square = local_tensor(state["exp_avg_sq"])
        update = Update(local_tensor(parameter.detach()), local_tensor(parameter.grad), mean, square, factors)
        part = self._parts.get(parameter) or ParameterPart(parameter, 0, self.draw_key(parameter))
        if self._rounding is None or part.key is None:
            return update
        places = self._rounding.places(part.parameter)
        return update._replace(key=part.key, places=places._replace(start=part.start) if part.start else places)

"""Updates of bfloat16 parameters that are right in the mean: float32 arithmetic, then rounding up or down by chance.

Rounded to the nearest, an update below 1/512 of a weight is lost altogether, at every step; by chance it is made in the
same share of the steps. Moments are rounded alike: to the nearest, a moving average with a beta near 1 stands still.

torchao's `_AdamW(bf16_stochastic_round=True)` (0.18) is not used: it is only AdamW and marked private, rounds moments
to the nearest, compiles a kernel for every shape, and draws from the global generator, so that replicas of a weight
part from each other and a resumed run rounds otherwise.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.train.optim.optimizer import OptimizerChoice, parameter_groups
from longspan.train.optim.rounding_bits import Key, RoundingBits, round_by_places


def build_rounding_optimizer(
    choice: OptimizerChoice, model: nn.Module, world: World, rates: Mapping[str, float] | None = None
) -> Optimizer:
    """Make an optimizer that rounds by chance: AdamW in one pass; another class one parameter at a time.

    >>> optimizer = build_rounding_optimizer(OptimizerChoice.of(config.train), model, world)

    `rates` are learning rates by the names of modules.
    """
    if choice.is_one_pass:
        groups = parameter_groups(model, choice.name, choice.weight_decay, rates)
        return choice.build(groups, rounding=RoundingBits(model, world))
    return StochasticRounding(choice, model, world, rates)


class StochasticRounding(Optimizer):
    """An optimizer that updates one parameter at a time in float32, and rounds it and its moments by chance.

    >>> optimizer = StochasticRounding(OptimizerChoice.of(config.train), model, world)

    Random bits are those of `RoundingBits`, whatever part of a parameter is here. Parameters and moments in bfloat16
    stay so; those of other types are updated as they are. `rates` are learning rates by the names of modules.
    """

    def __init__(
        self, choice: OptimizerChoice, model: nn.Module, world: World, rates: Mapping[str, float] | None = None
    ) -> None:
        """Take over the groups of the chosen optimizer; `_wide`, another one of its kind, updates float32 copies."""
        optimizer = choice.build(parameter_groups(model, choice.name, choice.weight_decay, rates))
        super().__init__(optimizer.param_groups, optimizer.defaults)
        # Steps on the float32 copy of one parameter. Until then it has a matrix: Muon takes nothing else.
        self._wide = choice.build([nn.Parameter(torch.zeros(1, 1))])
        self.kind: type[torch.optim.Optimizer] = choice.kind
        self._bits = RoundingBits(model, world)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; `closure` must be None, as a step does not evaluate the loss."""
        assert closure is None, "a step evaluates the loss once"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; the next update draws the random bits of the first update of its step."""
        super().load_state_dict(state_dict)
        self._bits.restart()

    def _update_parameter(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        wide_parameter = nn.Parameter(_widen_value(parameter.detach().clone()))
        wide_parameter.grad = _widen_value(parameter.grad)
        self._wide.param_groups[:] = [{**group, "params": [wide_parameter]}]
        state = {name: _widen_value(value) for name, value in self.state[parameter].items()}
        self._wide.state = defaultdict(dict, {wide_parameter: state} if state else {})
        self._wide.step()
        key = self._bits.key(parameter)
        parameter.copy_(self._round_value(wide_parameter.detach(), parameter, key, 0))
        self.state[parameter] = self._round_state(parameter, self._wide.state[wide_parameter], key)
        self._bits.count_update(parameter)

    def _round_state(self, parameter: nn.Parameter, wide_state: Mapping[str, Any], key: Key) -> dict[str, Any]:
        """Return the updated state of a parameter, each of its moments rounded by other bits.

        The parameter is rounded by the bits of stream 0, moments by those of streams 1, 2, and so on.
        """
        state, stream = dict[str, Any](), 0
        for name, value in wide_state.items():
            stream += _is_wide(value)
            state[name] = self._round_value(value, parameter, key, stream)
        return state

    def _round_value(self, value: Any, parameter: nn.Parameter, key: Key, stream: int) -> Any:
        if not _is_wide(value) or parameter.dtype != torch.bfloat16:
            return value
        return round_by_places(value, key, self._bits.places(parameter), stream)


def _widen_value(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.dtype == torch.float32

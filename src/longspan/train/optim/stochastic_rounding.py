"""Updates of bfloat16 parameters that are right in the mean: float32 arithmetic, then rounding up or down by chance.

Rounded to the nearest, an update below 1/512 of a weight is lost altogether, at every step; by chance it is made in the
same share of the steps. Moments are rounded alike: to the nearest, a moving average with a beta near 1 stands still.

torchao's `_AdamW(bf16_stochastic_round=True)` (0.18) is not used: it is only AdamW and marked private, rounds moments
to the nearest, compiles a kernel for every shape, and draws from the global generator, so that replicas of a weight
part from each other and a resumed run rounds otherwise.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.model.weights.local_tensors import LocalPart, local_tensor
from longspan.train.optim.optimizer import OptimizerChoice, parameter_groups


class StochasticRounding(Optimizer):
    """An optimizer that updates one parameter at a time in float32, and rounds it and its moments by chance.

    >>> optimizer = StochasticRounding(OptimizerChoice.of(config.train), model, world)

    Random bits are drawn from the world's seed and step, the parameter's name and the block of it that is here: a
    resumed run repeats them, and ranks that hold the same block draw the same. Parameters and moments in bfloat16 stay
    so; those of other types are updated as they are. `rates` are learning rates by the names of modules.
    """

    def __init__(
        self, choice: OptimizerChoice, model: nn.Module, world: World, rates: Mapping[str, float] | None = None
    ) -> None:
        optimizer = choice.build(parameter_groups(model, choice.name, choice.weight_decay, rates))
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._wide = choice.build([nn.Parameter(torch.zeros(1, 1))])  # steps on the float32 copy of one parameter
        self.kind: type[torch.optim.Optimizer] = choice.kind
        self._world, self._parameter_blocks = world, _parameter_blocks(model)
        self._last_step, self._draws = -1, Counter[nn.Parameter]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        assert closure is None, "a step evaluates the loss once"
        if self._world.step != self._last_step:
            self._last_step, self._draws = self._world.step, Counter()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; the next update draws as the first one of its step."""
        super().load_state_dict(state_dict)
        self._last_step = -1

    def _update_parameter(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Update one parameter and its state in float32, and round both."""
        assert parameter.grad is not None
        wide_parameter = nn.Parameter(_widen_value(parameter.detach().clone()))
        wide_parameter.grad = _widen_value(parameter.grad)
        self._wide.param_groups[:] = [{**group, "params": [wide_parameter]}]
        state = {name: _widen_value(value) for name, value in self.state[parameter].items()}
        self._wide.state = defaultdict(dict, {wide_parameter: state} if state else {})
        self._wide.step()
        bits = self._random_generator(parameter)
        self.state[parameter] = {
            name: _round_value(value, parameter.dtype, bits) for name, value in self._wide.state[wide_parameter].items()
        }
        parameter.copy_(_round_value(wide_parameter.detach(), parameter.dtype, bits))

    def _random_generator(self, parameter: nn.Parameter) -> torch.Generator:
        draws = self._draws[parameter]  # of this step: the caller may not count steps
        self._draws[parameter] += 1
        counted = self._world.seed, self._last_step, draws, self._parameter_blocks.get(parameter)
        seed = int.from_bytes(hashlib.blake2b(repr(counted).encode(), digest_size=7).digest(), "little")
        return torch.Generator(local_tensor(parameter).device).manual_seed(seed)


def round_stochastically(x: Tensor, bits: torch.Generator) -> Tensor:
    """Round a float32 tensor to bfloat16: each number to one of its two neighbours, so that the mean is the number.

    Sixteen random bits are added to those that bfloat16 lacks, and what carries over rounds away from zero.
    """
    noise = torch.empty(x.shape, dtype=torch.int32, device=x.device).random_(0, 1 << 16, generator=bits)
    rounded = ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _round_value(value: Any, dtype: torch.dtype, bits: torch.Generator) -> Any:
    """Return an updated float32 value in its parameter's type; counters of steps and the like stay as they are."""
    if not _is_wide(value) or dtype != torch.bfloat16:
        return value
    rounded = value.to(dtype)
    local_tensor(rounded).copy_(round_stochastically(local_tensor(value), bits))
    return rounded


def _widen_value(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.dtype == torch.float32


def _parameter_blocks(model: nn.Module) -> dict[nn.Parameter, tuple[str, Any]]:
    """Return the name and the block of every parameter here; copies on several pipeline stages have one name."""
    return {parameter: (name, LocalPart.of(parameter).block) for name, parameter in model.named_parameters()}

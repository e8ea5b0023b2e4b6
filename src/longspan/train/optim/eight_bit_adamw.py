"""AdamW whose moments are in eight bits on the device, and in bfloat16 in checkpoints, of any number of ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.weights.local_tensors import LocalPart, local_tensor
from longspan.train.optim.adamw_updates import Factors, Update, numbers_per_chunk
from longspan.train.optim.moment_codes import (
    MEAN_SCALE_BYTES,
    NEAREST,
    SQUARE_SCALE_BYTES,
    PackedMoments,
    packed_bytes,
)
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.state_buckets import sharded_state
from longspan.train.optim.stochastic_rounding import Places, RandomKey

MEAN = "exp_avg"
SQUARE = "exp_avg_sq"
_SCALE_BYTES = {MEAN: MEAN_SCALE_BYTES, SQUARE: SQUARE_SCALE_BYTES}


class EightBitAdamW(OnePassAdamW):
    """OnePassAdamW whose moments take 2 + 12 / 256 bytes of a weight: codes, and scales of 256 neighbours of a shard.

    Codes are rounded by chance, by bits of the count of steps and of the number's place, counted from the shard's first
    number in the whole. A state dict has the moments in bfloat16 on the host; loading takes any type, and rounds to the
    nearest code.

    Raises ModelError for parameters that are not in float32 or bfloat16.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._first_places = dict[nn.Parameter, int]()

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the state as torch does, with moments in bfloat16 on the host, as DTensors of sharded parameters."""
        state_dict = super().state_dict()
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for index, parameter in enumerate(parameters):
            if (state := state_dict["state"].get(index)) is not None:
                state_dict["state"][index] = state | _unpack_moments(state, parameter)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; moments are packed one after another, and never whole on the device."""
        states: dict[Any, dict[str, Any]] = state_dict["state"]
        counts = {
            key: {name: x for name, x in state.items() if name not in _SCALE_BYTES} for key, state in states.items()
        }
        super().load_state_dict(state_dict | {"state": counts})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(keys, parameters, strict=True):
            if _SCALE_BYTES.keys() <= states.get(key, {}).keys():
                self.state[parameter] |= _pack_moments(states[key], parameter)

    def _make_states_and_count_step(self, parameter: nn.Parameter) -> float:
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(
                f"moments in eight bits were given a parameter {tuple(parameter.shape)} in {parameter.dtype}; use "
                "float32 or bfloat16 (model.dtype), or leave optimizer.moments out"
            )
        if not self.state[parameter]:
            self.state[parameter] = {"step": torch.tensor(0.0)} | _allocate_moments(
                local_tensor(parameter.detach())
            )
        return super()._make_states_and_count_step(parameter)

    def _make_update(self, parameter: nn.Parameter, factors: Factors) -> Update:
        count = self.state[parameter]["step"].item()
        key = RandomKey.from_source("moments", count)
        if parameter not in self._first_places:
            block = LocalPart.from_parameter(parameter).block
            self._first_places[parameter] = Places.from_block(parameter.shape, block).offset
        rounding = (key, self._first_places[parameter])
        return super()._make_update(parameter, factors)._replace(moments_rounding=rounding)


def _allocate_moments(local: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.zeros(packed_bytes(local.numel(), size), dtype=torch.uint8, device=local.device)
        for name, size in _SCALE_BYTES.items()
    }


def _pack_moments(state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
    """Moments of any type and device are rounded to the nearest code."""
    local = local_tensor(parameter.detach())
    moments = [local_tensor(state[name]).reshape(-1) for name in (MEAN, SQUARE)]
    codes = _allocate_moments(local)
    packed = PackedMoments(codes[MEAN], codes[SQUARE], local.numel())
    for start, stop in _chunks(local):
        mean, square = (moment[start:stop].to(local.device, torch.float32) for moment in moments)
        nearest = torch.full_like(mean, NEAREST, dtype=torch.int32)
        packed.write(start, stop, mean, square, (nearest, nearest))
    return codes


def _unpack_moments(state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
    """The bfloat16 tensors are on the host, sharded as the parameter is."""
    local = local_tensor(parameter.detach())
    packed = PackedMoments(state[MEAN], state[SQUARE], local.numel())
    moments = {name: torch.empty(local.shape, dtype=torch.bfloat16) for name in (MEAN, SQUARE)}
    for start, stop in _chunks(local):
        for moment, numbers in zip(moments.values(), packed.read(start, stop), strict=True):
            moment.view(-1)[start:stop] = numbers
    return {name: sharded_state(parameter.detach(), moment) for name, moment in moments.items()}


def _chunks(local: Tensor) -> Iterator[tuple[int, int]]:
    """Each run (start, stop) begins with a block."""
    size = numbers_per_chunk(local.device)
    for start in range(0, local.numel(), size):
        yield start, min(start + size, local.numel())

"""AdamW whose moments are in eight bits on the device, and in bfloat16 in checkpoints, of any number of ranks."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.model.weights.local_tensors import LocalPart, local_tensor
from longspan.train.optim.moment_codes import (
    MEAN_SCALE_BYTES,
    NEAREST,
    SIZE,
    SQUARE_SCALE_BYTES,
    decode_mean,
    decode_square,
    encode_mean,
    encode_square,
    packed_bytes,
    split_packed,
)
from longspan.train.optim.offload_states import make_sharded_tensor
from longspan.train.optim.one_pass_adamw import Factors, OnePassAdamW, Places, RandomKey, Update, numbers_per_chunk

MEAN = "exp_avg"
SQUARE = "exp_avg_sq"
_SCALE_BYTES = {MEAN: MEAN_SCALE_BYTES, SQUARE: SQUARE_SCALE_BYTES}
_KINDS = {
    MEAN: (torch.float32, decode_mean, encode_mean),
    SQUARE: (torch.int32, decode_square, encode_square),
}


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
        state_dict = super().state_dict()
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for index, parameter in enumerate(parameters):
            if (state := state_dict["state"].get(index)) is not None:
                moments = {name: _unpack(state[name], name, parameter) for name in _KINDS}
                state_dict["state"][index] = {**state, **moments}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; moments are packed one after another, and never whole on the device."""
        states: dict[Any, dict[str, Any]] = state_dict["state"]
        counts = {
            key: {name: x for name, x in state.items() if name not in _KINDS} for key, state in states.items()
        }
        super().load_state_dict(state_dict | {"state": counts})
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for key, parameter in zip(keys, parameters, strict=True):
            for name in _KINDS.keys() & states.get(key, {}).keys():
                self.state[parameter][name] = _pack(local_tensor(states[key][name]), name, parameter)

    def _count_step(self, parameter: nn.Parameter) -> float:
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(
                f"moments in eight bits were given a parameter {tuple(parameter.shape)} in {parameter.dtype}; use "
                "float32 or bfloat16 (model.dtype), or leave optimizer.moments out"
            )
        if not self.state[parameter]:
            local = local_tensor(parameter.detach())
            zeros = {
                name: torch.zeros(packed_bytes(local.numel(), size), dtype=torch.uint8, device=local.device)
                for name, size in _SCALE_BYTES.items()
            }
            self.state[parameter] = {"step": torch.tensor(0.0)} | zeros
        return super()._count_step(parameter)

    def _make_update(self, parameter: nn.Parameter, factors: Factors) -> Update:
        count = self.state[parameter]["step"].item()
        digest = hashlib.blake2b(repr(("moments", count)).encode(), digest_size=8).digest()
        key = RandomKey(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))
        if parameter not in self._first_places:
            block = LocalPart.from_parameter(parameter).block
            self._first_places[parameter] = Places.from_block(parameter.shape, block).offset
        rounding = (key, self._first_places[parameter])
        return super()._make_update(parameter, factors)._replace(moments_rounding=rounding)


def _pack(moment: Tensor, name: str, parameter: nn.Parameter) -> Tensor:
    local = local_tensor(parameter.detach())
    dtype, _, encode = _KINDS[name]
    packed = torch.zeros(packed_bytes(local.numel(), _SCALE_BYTES[name]), dtype=torch.uint8, device=local.device)
    codes, scales = split_packed(packed, local.numel(), dtype)
    for start, stop, blocks in _chunks(local):
        numbers = moment.reshape(-1)[start:stop].to(local.device, torch.float32)
        codes[start:stop], scales[blocks] = encode(numbers, torch.full_like(numbers, NEAREST, dtype=torch.int32))
    return packed


def _unpack(packed: Tensor, name: str, parameter: nn.Parameter) -> Tensor:
    local = local_tensor(parameter.detach())
    dtype, decode, _ = _KINDS[name]
    codes, scales = split_packed(packed, local.numel(), dtype)
    moment = torch.empty(local.shape, dtype=torch.bfloat16)
    for start, stop, blocks in _chunks(local):
        moment.view(-1)[start:stop] = decode(codes[start:stop], scales[blocks])
    return make_sharded_tensor(parameter.detach(), moment)


def _chunks(local: Tensor) -> Iterator[tuple[int, int, slice]]:
    size = numbers_per_chunk(local.device)
    for start in range(0, local.numel(), size):
        stop = min(start + size, local.numel())
        yield start, stop, slice(start // SIZE, -(-stop // SIZE))

"""The design of others for two modules on the same ranks: gather every row of a replica, keep what is one's own.

As the colocated bridge of Megatron-LM does it, extended to context parallelism by a sum over its ranks, in plain
collectives of torch.distributed with buffers that are made once:

- forward: ranks whose encoder replicas feed one replica of the language model gather all its rows; where one encoder
  replica feeds several, its rows are cut. Then each rank takes the rows of its positions.
- backward: gradients are written into zeros for all rows of the replica and summed over the cp ranks; then cut to the
  encoder replica's rows, or gathered from the replicas that it feeds.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bridge_layouts import BridgeCase
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatherBridge:
    """This rank's side. Made by all ranks together; what it returns is valid until the next call."""

    def __init__(self, case: BridgeCase, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        self._fan_in, self._fan_out = case.replicas
        block = case.tp * case.cp  # ranks of one replica of the language model
        replica, place = divmod(rank, block)
        self._cp = _group_of(
            rank,
            [[d * block + c * case.tp + t for c in range(case.cp)] for d in range(case.dp) for t in range(case.tp)],
        )
        self._feeding = _group_of(
            rank,
            [
                [d * block + e * case.encoder_tp + t for e in range(self._fan_in)]
                for d in range(case.dp)
                for t in range(case.encoder_tp)
            ],
        )
        self._fed = _group_of(
            rank,
            [
                [(e * self._fan_out + d) * block + p for d in range(self._fan_out)]
                for e in range(case.dp // self._fan_out)
                for p in range(block)
            ],
        )
        # where the rows of this rank are: in its replica's, and of these in its encoder's
        self._cut = (replica % self._fan_out) * case.rows
        self._slot = (place // case.encoder_tp) * (case.rows // self._fan_in)
        self._rows = case.rows
        places = torch.from_numpy(case.need().rows(rank) - replica * case.rows)
        self._places = places.to(device)
        options = {"device": device, "dtype": dtype}
        self._whole = torch.empty(case.rows, case.hidden, **options)
        self._mine = torch.empty(len(places), case.hidden, **options)
        self._all = torch.empty(case.rows * self._fan_out, case.hidden, **options) if self._fan_out > 1 else self._whole

    def forward(self, x: Tensor) -> Tensor:
        """This rank's encoder's rows (have, D) to those of its positions (need, D)."""
        if self._fan_in > 1:
            _all_gather(self._whole, x, group=self._feeding)
            x = self._whole
        return torch.index_select(x.narrow(0, self._cut, self._rows), 0, self._places, out=self._mine)

    def backward(self, gradient: Tensor) -> Tensor:
        """Gradients of the rows of its positions (need, D) to those of its encoder's rows (have, D)."""
        self._whole.zero_().index_copy_(0, self._places, gradient)
        dist.all_reduce(self._whole, group=self._cp)
        if self._fan_out > 1:
            _all_gather(self._all, self._whole, group=self._fed)
            return self._all
        return self._whole.narrow(0, self._slot, self._rows // self._fan_in)


def _group_of(rank: int, lines: list[list[int]]) -> ProcessGroup | None:
    """The group of this rank among these, which all ranks make in one order; None where it would be alone."""
    if len(lines[0]) == 1:
        return None
    groups = [(line, dist.new_group(line)) for line in lines]
    (group,) = (group for line, group in groups if rank in line)
    assert isinstance(group, ProcessGroup)
    return group

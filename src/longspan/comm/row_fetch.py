"""Brings the rows before a member's runs from whichever members hold them, and takes their gradients back."""

import numpy as np
import torch
from torch import Tensor

from longspan.comm.autograd import apply_with_gradient
from longspan.comm.channel import Channel, Handle
from longspan.comm.device import to_device
from longspan.comm.shard import ShardPart
from longspan.comm.world import world_of
from longspan.layout.rows_before import PrefixTree, RowsBefore, rows_before


def part_rows_before(part: ShardPart, reach: int) -> RowsBefore:
    """Return the rows before the runs of this rank's part of a group."""
    group = part.group
    prefixes = None
    if group.parents is not None:
        prefixes = PrefixTree(np.asarray(group.parents), np.asarray(group.bases))
    return rows_before([part.segments(member) for member in range(part.degree)], part.member, reach, prefixes)


class RowFetch:
    """The exchange of `RowsBefore` for one part of a shard; make it once a shard, for all layers.

    >>> fetch = RowFetch(part, part_rows_before(part, reach=3), shard.device)
    >>> arrived = fetch.fetch(x, "rows before a run")   # x (T, C) -> (rows, C)
    """

    def __init__(self, part: ShardPart, before: RowsBefore, device: torch.device) -> None:
        self.part: ShardPart = part
        self.before: RowsBefore = before
        self.rows: Tensor = to_device(before.rows, device)

    @property
    def channel(self) -> Channel:
        """The channel of the group's slots. Raises CommError where the world has been left."""
        return world_of(self.part.world_key).channels.find_channel(self.part.group.slots)

    def send(self, x: Tensor, label: str) -> Handle | None:
        """Start sending the rows of x (T, C) that others read; None where no member of the group needs any."""
        if not self.before.travels:
            return None
        leaving = x.index_select(0, self.rows)
        return self.channel.all_to_all_rows(leaving, self.before.sends, self.before.receives, label)

    def send_back(self, gradients: Tensor, label: str) -> Handle | None:
        """Start sending the gradients of the rows that arrived to their owners, who add them to those of `rows`."""
        if not self.before.travels:
            return None
        return self.channel.all_to_all_rows(
            gradients, self.before.receives, self.before.sends, f"gradients of {label}"
        )

    def fetch(self, x: Tensor, label: str) -> Tensor:
        """Return the rows that arrive, of x (T, C). Differentiable: every member enters, forward and backward."""
        shape = x.shape

        def forward(x: Tensor) -> Tensor:
            handle = self.send(x, label)
            return x.new_empty((0, *shape[1:])) if handle is None else handle.wait()

        def backward(gradient: Tensor) -> Tensor:
            handle = self.send_back(gradient.contiguous(), label)
            total = gradient.new_zeros(shape)
            return total if handle is None else total.index_add_(0, self.rows, handle.wait())

        return apply_with_gradient(x, forward, backward)

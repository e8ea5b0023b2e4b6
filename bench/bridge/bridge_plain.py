"""The bytes of a bridge alone: an all-to-all between ranks that exchange anything, from one buffer into another."""

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from longspan.layout.segments import Integers


class Components(NamedTuple):
    """The ranks that exchange anything with each other, group by group, and the group of this rank."""

    ranks: tuple[tuple[int, ...], ...]
    mine: tuple[int, ...]
    group: ProcessGroup | None  # None where this rank exchanges nothing


def components(counts: Integers, rank: int) -> Components:
    """The connected ranks of a table of rows (sender, receiver); made by all ranks together."""
    reached = (counts + counts.T > 0) | np.eye(len(counts), dtype=bool)
    for _ in range(len(counts)):
        reached = reached @ reached
    lines: tuple[tuple[int, ...], ...] = tuple(dict.fromkeys(tuple(np.flatnonzero(row).tolist()) for row in reached))
    groups = [(line, dist.new_group(list(line))) for line in lines if len(line) > 1]
    (mine,) = (line for line in lines if rank in line)
    (group,) = (group for line, group in groups if line == mine) if len(mine) > 1 else (None,)
    assert group is None or isinstance(group, ProcessGroup)
    return Components(lines, mine, group)


def equal_counts(counts: Integers, lines: tuple[tuple[int, ...], ...]) -> tuple[Integers, int]:
    """A table in which every rank of a component sends and receives what its busiest one does, and the most of all."""
    table, most = np.zeros_like(counts), 0
    for line in lines:
        inside = counts[np.ix_(line, line)]
        busiest = int(max(inside.sum(0).max(), inside.sum(1).max()))
        if len(line) > 1:
            table[np.ix_(line, line)] = -(-busiest // (len(line) - 1)) * (1 - np.eye(len(line), dtype=np.int64))
        most = max(most, busiest)
    return table, most


class PlainExchange:
    """One `all_to_all_single` with these counts (sender, receiver), nothing packed and nothing unpacked."""

    def __init__(
        self, counts: Integers, among: Components, rank: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        members = list(among.mine)
        self._group = among.group
        self._sends, self._receives = counts[rank, members].tolist(), counts[members, rank].tolist()
        self._x = torch.zeros(sum(self._sends), hidden, dtype=dtype, device=device)
        self._into = torch.empty(sum(self._receives), hidden, dtype=dtype, device=device)
        self._idle = not counts[np.ix_(members, members)].any()

    def run(self) -> None:
        """Exchange; nothing happens where nobody has anything to send."""
        if self._group is not None and not self._idle:
            dist.all_to_all_single(self._into, self._x, self._receives, self._sends, group=self._group)

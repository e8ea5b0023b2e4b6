"""Values of the host that ranks share: digests, flags, sums, small objects. Over gloo, also beside GPUs.

Tensors of the model never come here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from longspan.comm.failure.watch import Watch
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.layout.layout import short

T = TypeVar("T")


class HostValues(ABC):
    """What a `World` offers on the host's own values. Every method is entered by all ranks."""

    home: Layout
    plane: tuple[int, ...]

    @property
    @abstractmethod
    def watch(self) -> Watch:
        """What this rank is doing, for error messages."""

    @property
    @abstractmethod
    def control(self) -> ProcessGroup:
        """The gloo group over all ranks."""

    @property
    @abstractmethod
    def plane_group(self) -> ProcessGroup:
        """The group over this rank's plane."""

    def agree(self, digest: str, *, flag: bool = False) -> bool:
        """Compare a hexadecimal digest over all ranks; returns whether the `flag` is set on any of them.

        Raises CommError that says which ranks hold what.
        """
        words = torch.frombuffer(bytearray.fromhex(digest.zfill(64)), dtype=torch.int64)
        both = torch.cat([words, ~words, torch.tensor([int(flag)])])  # the largest of ~w is ~(the smallest w)
        with self.watch.during("comparison of plans", self.home.ranks):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.control)
        if torch.equal(both[:4], ~both[4:8]):
            return bool(both[8].item())
        held: dict[str, list[int]] = {}
        for rank, other in zip(self.home.ranks, self.gather_objects(digest), strict=True):
            held.setdefault(other, []).append(rank)
        who = "; ".join(f"ranks {short(ranks)} hold {other[:12]}…" for other, ranks in held.items())
        raise CommError(
            f"the ranks hold {len(held)} different plans for step {self.watch.step}: {who}. A plan must be "
            f"made from the same lengths and settings on every rank"
        )

    def gather_objects(self, value: T, what: str = "gather of host values") -> list[T]:
        """Every rank's value, in the order of the home's ranks. For small host data."""
        found: list[Any] = [None] * len(self.home.ranks)
        with self.watch.during(what, self.home.ranks):
            dist.all_gather_object(found, value, group=self.control)
        by_rank = dict(zip(sorted(self.home.ranks), found, strict=True))  # torch sorts the ranks of a group
        return [by_rank[rank] for rank in self.home.ranks]

    def broadcast_object(self, value: T, source: int | None = None, what: str = "broadcast of host values") -> T:
        """The value of the `source` rank (default: the home's first). For small host data."""
        box: list[Any] = [value]
        with self.watch.during(what, self.home.ranks):
            dist.broadcast_object_list(box, src=self.home.ranks[0] if source is None else source, group=self.control)
        return box[0]

    def barrier(self, what: str = "barrier") -> None:
        """Wait until every rank is here."""
        with self.watch.during(what, self.home.ranks):
            dist.barrier(group=self.control)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        found = torch.tensor([int(flag)])
        with self.watch.during("agreement on a flag", self.home.ranks):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.control)
        return bool(found.item())

    def reduce_sum(self, values: Sequence[float], what: str = "sum over slots") -> list[float]:
        """Sums over the slots of this plane, in float64 and in one order, so that every rank gets the same bits."""
        own = torch.tensor(list(values), dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in self.plane]
        with self.watch.during(what, self.plane):
            dist.all_gather(parts, own, group=self.plane_group)
        return torch.stack(parts).sum(0).tolist()

    def sum_over_ranks(self, values: Sequence[float], what: str = "sum over ranks") -> list[float]:
        """Sums over all ranks of the home, in float64 and in one order: the same bits on every rank."""
        return torch.tensor(list(self.gather_values(values, what).values()), dtype=torch.float64).sum(0).tolist()

    def gather_values(self, values: Sequence[float], what: str = "gather of numbers") -> dict[int, tuple[float, ...]]:
        """Every rank's numbers, as many on each, in float64, by rank; the same on every rank of the home."""
        own = torch.tensor(list(values), dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in self.home.ranks]
        with self.watch.during(what, self.home.ranks):
            dist.all_gather(parts, own, group=self.control)
        ranks = sorted(self.home.ranks)  # torch sorts the ranks of a group
        return {rank: tuple(part.tolist()) for rank, part in zip(ranks, parts, strict=True)}

    def sum_over_stages(self, values: Sequence[float], what: str = "sum over slots") -> list[float]:
        """Sums over the slots of all pipeline stages, in float64 and in one order: the same bits on every rank.

        As `reduce_sum` where there is one stage.
        """
        if self.home.pp == 1:
            return self.reduce_sum(values, what)
        found = self.gather_values(values, what)
        ranks = [rank for stage in range(self.home.pp) for rank in self.home.plane(pp=stage)]
        return torch.tensor([found[rank] for rank in ranks], dtype=torch.float64).sum(0).tolist()

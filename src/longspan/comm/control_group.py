"""Values of the host that ranks share: digests, flags, sums, small objects. Over gloo, with GPUs too.

Tensors of the model never come here.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.groups.process_groups import ProcessGroups
from longspan.comm.watch import Watch
from longspan.errors import CommError
from longspan.layout import Floats, Layout
from longspan.layout.layout import short

T = TypeVar("T")


class ControlGroup:
    """The gloo group of all ranks of a home, `world.control`. Every method is entered by all ranks.

    >>> world.control.gather_objects(losses)
    """

    def __init__(self, home: Layout, plane: tuple[int, ...], groups: ProcessGroups) -> None:
        self.home, self.plane = home, plane
        self._groups = groups
        group = groups.make_group(home.ranks, "control", backend="gloo")
        assert group is not None
        self.group = group

    @property
    def _watch(self) -> Watch:
        return self._groups.watch

    def agree(self, digest: str, *, flag: bool = False, what: str = "plans", hint: str = "") -> bool:
        """Compare a hexadecimal digest over all ranks; returns whether the `flag` is set on any of them.

        Raises CommError with the ranks that hold each of the different `what`, and a `hint` what to do.
        """
        return self.agree_on_flags(digest, flag, what=what, hint=hint)[0]

    def agree_on_flags(self, digest: str, *flags: bool, what: str = "plans", hint: str = "") -> tuple[bool, ...]:
        """Agree as `agree` does, with several flags in one message; every rank gives as many."""
        words = torch.frombuffer(bytearray.fromhex(digest.zfill(64)), dtype=torch.int64)
        message = torch.cat([words, ~words, torch.tensor(flags, dtype=torch.int64)])  # max of ~w is ~(min of w)
        with self._watch.during("comparison of plans", self.home.ranks):
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group)
        if torch.equal(message[:4], ~message[4:8]):
            return tuple(map(bool, message[8:].tolist()))
        ranks_of: dict[str, list[int]] = {}
        for rank, digest_there in zip(self.home.ranks, self.gather_objects(digest), strict=True):
            ranks_of.setdefault(digest_there, []).append(rank)
        holders = "; ".join(
            f"ranks {short(ranks)} hold {digest_there[:12]}…" for digest_there, ranks in ranks_of.items()
        )
        items = " and items" if what == "lists of items" else ""
        hint = hint or f"A plan must be made from the same lengths{items} and settings on every rank"
        raise CommError(
            f"the ranks hold {len(ranks_of)} different {what} for step {self._watch.step}: {holders}. {hint}"
        )

    def gather_objects(self, value: T, what: str = "gather of host values") -> list[T]:
        """Every rank's value, in the order of the home's ranks. For small host data."""
        values: list[Any] = [None] * len(self.home.ranks)
        with self._watch.during(what, self.home.ranks):
            dist.all_gather_object(values, value, group=self.group)
        by_rank = dict(zip(sorted(self.home.ranks), values, strict=True))  # torch sorts the ranks of a group
        return [by_rank[rank] for rank in self.home.ranks]

    def broadcast_object(self, value: T, source: int | None = None, what: str = "broadcast of host values") -> T:
        """The value of the `source` rank (default: the home's first). For small host data."""
        box: list[Any] = [value]
        with self._watch.during(what, self.home.ranks):
            dist.broadcast_object_list(box, src=self.home.ranks[0] if source is None else source, group=self.group)
        return box[0]

    def barrier(self, what: str = "barrier") -> None:
        """Wait until every rank is here."""
        with self._watch.during(what, self.home.ranks):
            dist.barrier(group=self.group)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.any_ranks(flag)[0]

    def any_ranks(self, *flags: bool) -> tuple[bool, ...]:
        """Whether each flag is set on any rank; every rank gives as many."""
        values = torch.tensor(flags, dtype=torch.int64)
        with self._watch.during("agreement on a flag", self.home.ranks):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(map(bool, values.tolist()))

    def sum_over_slots(self, values: Sequence[float], what: str = "sum over slots") -> list[float]:
        """Sums over the slots of this plane, in float64 and in one order, so that every rank gets the same bits."""
        local = torch.tensor(list(values), dtype=torch.float64)
        parts = [torch.empty_like(local) for _ in self.plane]
        with self._watch.during(what, self.plane):
            dist.all_gather(parts, local, group=self._groups.parent("plane"))
        return torch.stack(parts).sum(0).tolist()

    def sum_over_ranks(self, values: Sequence[float], what: str = "sum over ranks") -> list[float]:
        """Sums over all ranks of the home, in float64 and in one order: the same bits on every rank."""
        return torch.stack(list(self._gather_floats(values, what).values())).sum(0).tolist()

    def sum_over_stages(self, values: Sequence[float], what: str = "sum over slots") -> list[float]:
        """Sums over the slots of all pipeline stages, in float64 and in one order: the same bits on every rank.

        This is `sum_over_slots` where there is one stage.
        """
        if self.home.pp == 1:
            return self.sum_over_slots(values, what)
        numbers = self._gather_floats(values, what)
        ranks = [rank for stage in range(self.home.pp) for rank in self.home.plane(pp=stage)]
        return torch.stack([numbers[rank] for rank in ranks]).sum(0).tolist()

    def sum_of_arrays(self, values: Floats, what: str = "sum of arrays") -> Floats:
        """Sums over all ranks of an array's elements, in memory of one array: the same bits on every rank."""
        total = torch.from_numpy(values).clone()
        with self._watch.during(what, self.home.ranks):
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.group)
        return total.numpy()

    def largest_of(self, values: Sequence[float], what: str) -> list[float]:
        """The largest of all ranks' values, of each of several; as many on each rank."""
        box = torch.tensor(list(values), dtype=torch.float64)
        with self._watch.during(what, self.home.ranks):
            dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.group)
        return box.tolist()

    def largest(self, value: int) -> int:
        """The largest of all ranks' values."""
        box = torch.tensor([value], dtype=torch.int64)
        with self._watch.during("largest of host values", self.home.ranks):
            dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.group)
        return int(box.item())

    def _gather_floats(self, values: Sequence[float], what: str) -> dict[int, Tensor]:
        """Every rank's numbers, as many on each, in float64, in ascending order of ranks."""
        local = torch.tensor(list(values), dtype=torch.float64)
        parts = [torch.empty_like(local) for _ in self.home.ranks]
        with self._watch.during(what, self.home.ranks):
            dist.all_gather(parts, local, group=self.group)
        return dict(zip(sorted(self.home.ranks), parts, strict=True))  # torch sorts the ranks of a group

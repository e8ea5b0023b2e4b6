"""Values of the host that ranks share: digests, flags, sums, small objects. Over gloo, with GPUs too.

Tensors of the model never come here.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.groups.pair_rounds import PairRounds
from longspan.comm.groups.process_groups import ProcessGroups
from longspan.comm.watch import Watch
from longspan.errors import CommError
from longspan.layout import Floats, Layout
from longspan.layout.layout import excerpt

T = TypeVar("T")

_LARGE = 1 << 16  # bytes from which an array goes around gloo's ring


class ControlGroup:
    """The gloo group of all ranks of a home, `world.control`. Every method is entered by all ranks.

    `plane` are the ranks, one for each slot, of this rank's pipeline stage and tensor-parallel index.

    >>> world.control.gather_objects(losses)
    """

    def __init__(self, home: Layout, plane: tuple[int, ...], groups: ProcessGroups) -> None:
        """Make the group over all ranks of the home; small values go over it in rounds of pairs, large ones by gloo."""
        self.home: Layout = home
        self.plane: tuple[int, ...] = plane
        self._groups = groups
        group = groups.make_group(home.ranks, "control", backend="gloo")
        assert group is not None
        self.group = group
        groups.set_parent("control", group)
        watch = groups.watch
        self._rounds = PairRounds(group, home.ranks, watch.rank, lambda: watch.timeout)
        self._rounds_of_plane = PairRounds(group, plane, watch.rank, lambda: watch.timeout)
        self.barrier("making the control group")  # connects the pairs, so that each notices when the other leaves

    @property
    def _watch(self) -> Watch:
        return self._groups.watch

    def agree(self, digest: str, *, flag: bool = False, what: str = "plans", hint: str = "") -> bool:
        """Compare a hexadecimal digest over all ranks; returns whether the `flag` is set on any of them.

        Raises CommError with the ranks that hold each of the different digests: `what` names what was compared, and
        `hint` says what to do.
        """
        return self.agree_on_flags(digest, flag, what=what, hint=hint)[0]

    def agree_on_flags(self, digest: str, *flags: bool, what: str = "plans", hint: str = "") -> tuple[bool, ...]:
        """Compare a digest as `agree` does; returns of each flag whether it is set on any rank.

        One message carries digest and flags, so every rank gives the same number of flags.
        """
        is_same, any_flags = self._compare_digests(digest, flags, f"comparison of {what}")
        if is_same:
            return any_flags
        ranks_of: dict[str, list[int]] = {}
        for rank, digest_there in zip(self.home.ranks, self.gather_objects(digest), strict=True):
            ranks_of.setdefault(digest_there, []).append(rank)
        holders = "; ".join(
            f"ranks {excerpt(ranks)} hold {digest_there[:12]}…" for digest_there, ranks in ranks_of.items()
        )
        items = " and items" if what == "lists of items" else ""
        hint = hint or f"A plan must be made from the same lengths{items} and settings on every rank"
        raise CommError(
            f"the ranks hold {len(ranks_of)} different {what} for step {self._watch.step}: {holders}. {hint}"
        )

    def is_same(self, digest: str, what: str) -> bool:
        """Return whether all ranks hold the same hexadecimal digest."""
        return self._compare_digests(digest, (), what)[0]

    def _compare_digests(self, digest: str, flags: Sequence[bool], what: str) -> tuple[bool, tuple[bool, ...]]:
        """Compare a digest over all ranks: return whether all hold it, and which of the flags are set on any.

        One message of maxima does it: of the digest's four words, of their complements, and of the flags. Comparisons
        of all kinds match one another, so that ranks which compare different things find that out, and do not wait.
        """
        words = torch.frombuffer(bytearray.fromhex(digest.zfill(64)), dtype=torch.int64)
        message = torch.cat([words, ~words, torch.tensor(flags, dtype=torch.int64)])  # max of ~w is ~(min of w)
        with self._watch.during(what, self.home.ranks):
            largest = self._rounds.reduce(message, torch.maximum, "comparison")
        return torch.equal(largest[:4], ~largest[4:8]), tuple(map(bool, largest[8:].tolist()))

    def gather_objects(self, value: T, what: str = "gather of host values") -> list[T]:
        """Return every rank's value, in the order of the home's ranks.

        For small host data: each rank receives all of it.
        """
        by_rank = self.reduce_object({self._watch.rank: value}, lambda ours, theirs: ours | theirs, what)
        assert by_rank is not None
        return [by_rank[rank] for rank in self.home.ranks]

    def reduce_object(self, value: T | None, combine: Callable[[T, T], T], what: str) -> T | None:
        """Combine all ranks' values, in the order of the home's ranks; return the result on every rank.

        For small host data. `combine` gets two values, those of neighbouring runs of ranks. A value None is left out;
        where all are None, None is returned.
        """
        with self._watch.during(what, self.home.ranks):
            return self._rounds.reduce_object(value, combine, what)

    def first_object(self, value: T | None, what: str) -> tuple[int, T] | None:
        """Return the first rank, in the home's order, whose value is not None, and this value; None if all are."""
        return self.reduce_object(None if value is None else (self._watch.rank, value), _take_first, what)

    def broadcast_object(self, value: T, source: int | None = None, what: str = "broadcast of host values") -> T:
        """Return the value of the `source` rank (default: the home's first) on every rank. For small host data."""
        source = self.home.ranks[0] if source is None else source
        with self._watch.during(what, self.home.ranks):
            return self._rounds.broadcast_object(value, source, what)  # pyright: ignore[reportReturnType]

    def barrier(self, what: str = "barrier") -> None:
        """Wait until every rank is here."""
        self._reduce(torch.zeros(1), torch.maximum, what)

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.any_ranks(flag)[0]

    def any_ranks(self, *flags: bool) -> tuple[bool, ...]:
        """Return whether each flag is set on any rank; every rank gives the same number of flags."""
        values = self._reduce(torch.tensor(flags, dtype=torch.int64), torch.maximum, "agreement on a flag")
        return tuple(map(bool, values.tolist()))

    def sum_over_slots(self, values: Sequence[float], what: str = "sum over slots") -> list[float]:
        """Return sums over the slots of this plane, in float64 and in one order: the same bits on every rank."""
        local = torch.tensor(list(values), dtype=torch.float64)
        with self._watch.during(what, self.plane):
            return self._rounds_of_plane.reduce(local, torch.add, what).tolist()

    def sum_over_ranks(self, values: Sequence[float], what: str = "sum over ranks") -> list[float]:
        """Return sums over all ranks of the home, in float64 and in one order: the same bits on every rank."""
        return self._reduce(torch.tensor(list(values), dtype=torch.float64), torch.add, what).tolist()

    def sum_over_stages(self, values: Sequence[float], what: str = "sum over slots") -> list[float]:
        """Return sums over the slots of all pipeline stages, in float64 and in one order: the same bits on every rank.

        This is `sum_over_slots` where there is one stage.
        """
        if self.home.pp == 1:
            return self.sum_over_slots(values, what)
        is_counted = self.home.coordinates(self._watch.rank).tp == 0  # a slot's tensor-parallel ranks hold the same
        return self.sum_over_ranks(values if is_counted else [0.0] * len(values), what)

    def sum_of_arrays(self, values: Floats, what: str = "sum of arrays") -> Floats:
        """Return an array's elements summed over all ranks: the same bits on every rank.

        Large arrays go around gloo's ring, which sends each byte twice; in rounds each would be sent in every round.
        """
        total = torch.from_numpy(values).clone()
        if total.nbytes < _LARGE:
            return self._reduce(total, torch.add, what).numpy()
        with self._watch.during(what, self.home.ranks):
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.group)
        return total.numpy()

    def largest_of(self, values: Sequence[float], what: str) -> list[float]:
        """Return the largest of all ranks' values at each index of the list, which has one length on all ranks."""
        return self._reduce(torch.tensor(list(values), dtype=torch.float64), torch.maximum, what).tolist()

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values."""
        return int(self._reduce(torch.tensor([value]), torch.maximum, "largest of host values").item())

    def _reduce(self, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor], what: str) -> Tensor:
        """Combine all ranks' tensors of one shape and dtype, in the order of the home's ranks."""
        with self._watch.during(what, self.home.ranks):
            return self._rounds.reduce(x, combine, what)


def _take_first(first: tuple[int, T], _: tuple[int, T]) -> tuple[int, T]:
    return first

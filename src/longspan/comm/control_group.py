"""Values of the host that ranks share: digests, flags, sums, small objects. Over gloo, with GPUs too.

Tensors of the model never come here.
"""

import pickle
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longspan.comm.process_groups import ProcessGroups
from longspan.errors import CommError
from longspan.layout import Floats, Layout
from longspan.plain_text import excerpt

# Every member has room for as many flags of a comparison, for only messages of one size match.
_FLAGS = 2
T = TypeVar("T")
PairExchange = Callable[..., Any]  # (member, value, *, sends=True, receives=True) -> what the member sends


class PairRounds:
    """Reductions over the members by rounds of pairs over a gloo `group` that has all `ranks`, in their order.

    >>> PairRounds(group, ranks=(0, 1, 2), rank=0).reduce(x, torch.maximum, "largest lengths")

    There are as many places as the largest power of two that is no more than the ranks; where there are more ranks, the
    first places have two members each. `limit()` is how many seconds a message is waited for. Every method is entered
    by all members, one call at a time. Messages match by the name of the call, its number and the size of its tensor:
    members in different calls wait until that limit.
    """

    def __init__(
        self, group: ProcessGroup, ranks: Sequence[int], rank: int, limit: Callable[[], float] = lambda: 600.0
    ) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self._limit = limit
        places = 1 << (len(ranks).bit_length() - 1)
        self._pairs = len(ranks) - places  # places of two members each, the first ones
        self._bits = [1 << k for k in range(places.bit_length() - 1)]
        index = ranks.index(rank)
        in_pair = index < 2 * self._pairs
        self._place = index // 2 if in_pair else index - self._pairs
        self._is_second = in_pair and index % 2 == 1
        self._partner = None
        if in_pair:
            self._partner = index - 1 if self._is_second else index + 1
        self._calls = 0
        # The messages of the last call have this tag.
        self._tag = 0

    def reduce(self, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor], label: str) -> Tensor:
        """Combine all members' tensors of one shape and dtype, in the order of the members; all get the result."""
        self._begin_call(f"{label} of {x.nbytes} bytes")
        return self._reduce_in_rounds(x, self._exchange_tensors, combine)

    def reduce_object(self, value: T | None, combine: Callable[[T, T], T], label: str) -> T | None:
        """Reduce objects, which are pickled, as `reduce` does tensors; None is no value, and takes 8 bytes a round."""

        def combine_values(first: T | None, second: T | None) -> T | None:
            if first is None or second is None:
                return second if first is None else first
            return combine(first, second)

        self._begin_call(label)
        return self._reduce_in_rounds(value, self._exchange_objects, combine_values)

    def _begin_call(self, label: str) -> None:
        """Members in other calls get another tag, made from the number and the label of theirs."""
        self._calls += 1
        self._tag = zlib.crc32(f"{self._calls} {label}".encode()) >> 1  # gloo takes 31 bits

    def _reduce_in_rounds(self, value: Any, exchange: PairExchange, combine: Callable[[Any, Any], Any]) -> Any:
        """The result is the same on every member, bit for bit. Round i is between the first members of places that
        differ in bit i; the value of the lower place is always the first of the two that are combined. The second
        member of a place gives its value to the first one before the rounds, and gets the result from it after them."""
        if self._is_second:
            exchange(self._partner, value, receives=False)
            return exchange(self._partner, value, sends=False)
        if self._partner is not None:
            value = combine(value, exchange(self._partner, value, sends=False))
        for bit in self._bits:
            place = self._place ^ bit
            first_member = 2 * place if place < self._pairs else place + self._pairs
            partner_value = exchange(first_member, value)
            value = combine(partner_value, value) if self._place & bit else combine(value, partner_value)
        if self._partner is not None:
            exchange(self._partner, value, receives=False)
        return value

    def _exchange_tensors(self, member: int, x: Tensor, *, sends: bool = True, receives: bool = True) -> Tensor:
        """Without `receives` the result is one's own tensor."""
        into = torch.empty_like(x) if receives else x
        self._send_and_receive(member, x if sends else None, into if receives else None)
        return into

    def _exchange_objects(self, member: int, value: object, *, sends: bool = True, receives: bool = True) -> Any:
        """Sizes go first, then pickled values that are not None; the result is None where the member sent none."""
        packed = torch.empty(0)
        if sends and value is not None:
            packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = int(
            self._exchange_tensors(member, torch.tensor(len(packed), device="cpu"), sends=sends, receives=receives)
        )
        into = torch.empty(size if receives else 0, dtype=torch.uint8, device="cpu")
        self._send_and_receive(member, packed, into)
        return pickle.loads(into.numpy().tobytes()) if len(into) else None

    def _send_and_receive(self, member: int, sent: Tensor | None, into: Tensor | None) -> None:
        """A tensor without elements is neither sent nor received; each wait lasts at most `limit()` seconds."""
        peer = dist.get_group_rank(self._group, self._ranks[member])
        works = [self._group.recv([into], peer, self._tag)] if into is not None and into.numel() else []
        works += [self._group.send([sent], peer, self._tag)] if sent is not None and sent.numel() else []
        for work in works:
            work.wait(timedelta(seconds=self._limit()))


def _as_float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


_LARGE = 1 << 16  # bytes from which an array goes around gloo's ring


class ControlGroup:
    """The gloo group of all ranks of a home, `world.control`. Every method is entered by all ranks.

    `plane` are the ranks, one for each slot, of this rank's pipeline stage and tensor-parallel index.

    >>> world.control.gather_objects(losses)
    """

    def __init__(self, home: Layout, plane: tuple[int, ...], groups: ProcessGroups) -> None:
        self.home: Layout = home
        self.plane: tuple[int, ...] = plane
        self._groups = groups
        group = groups.make_group(home.ranks, "control", backend="gloo")
        assert group is not None
        self.group = group
        groups.parents["control"] = group
        watch = self._watch = groups.watch
        self._rounds = PairRounds(group, home.ranks, watch.rank, lambda: watch.timeout)
        self._rounds_of_plane = PairRounds(group, plane, watch.rank, lambda: watch.timeout)
        self._is_alone = len(home.ranks) == 1  # then nothing travels, and nothing is waited for
        self.barrier("making the control group")  # connects the pairs, so that each notices when the other leaves

    def compare_digests(self, digest: str, *flags: bool, what: str = "plans", hint: str = "") -> tuple[bool, ...]:
        """Raise CommError on all ranks if their digests differ; return, for each of at most two flags, whether any rank
        sets it.

        `digest` has at most 64 hex digits. One reduction by maxima does it: of the digest's four words, of their
        complements, and of the flags. Comparisons of all kinds match one another, so that ranks which compare different
        things find that out, and do not wait. The error lists the ranks that hold each of the different digests: `what`
        names what was compared, and `hint` says what to do (by default, for plans).
        """
        if self._is_alone:
            return flags
        words = torch.frombuffer(bytearray.fromhex(digest.zfill(64)), dtype=torch.int64)
        padding = (False,) * (_FLAGS - len(flags))
        # the maximum of ~w is ~(the minimum of w): digests are equal where maximum and minimum are
        message = torch.cat([words, ~words, torch.tensor([*flags, *padding], dtype=torch.int64)])
        with self._watch.enter_operation(f"comparison of {what}", self.home.ranks):
            largest = self._rounds.reduce(message, torch.maximum, "comparison")
        if torch.equal(largest[:4], ~largest[4:8]):
            return tuple(map(bool, largest[8 : 8 + len(flags)].tolist()))
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

    def gather_objects(self, value: T, label: str = "gather of host values") -> list[T]:
        """Return every rank's value, in the order of the home's ranks; for small host data."""
        by_rank = self.reduce_object({self._watch.rank: value}, lambda ours, theirs: ours | theirs, label)
        assert by_rank is not None
        return [by_rank[rank] for rank in self.home.ranks]

    def reduce_object(self, value: T | None, combine: Callable[[T, T], T], label: str) -> T | None:
        """Combine all ranks' values, in the order of the home's ranks; return the result on every rank.

        For small host data. `combine` gets two values, each of a run of ranks, of which the second follows the first. A
        value None is left out; where all are None, None is returned.
        """
        if self._is_alone:
            return value
        with self._watch.enter_operation(label, self.home.ranks):
            return self._rounds.reduce_object(value, combine, label)

    def first_object(self, value: T | None, label: str) -> tuple[int, T] | None:
        """Return the first rank, in the home's order, whose value is not None, and this value; None if all are."""
        pair = None if value is None else (self._watch.rank, value)
        return self.reduce_object(pair, lambda first, _: first, label)

    def broadcast_object(self, value: T, source: int | None = None, label: str = "broadcast of host values") -> T:
        """Return the value of the `source` rank (default: the home's first) on every rank. For small host data."""
        source = self.home.ranks[0] if source is None else source
        sent = value if self._watch.rank == source else None
        return self.reduce_object(sent, lambda first, _: first, label)  # pyright: ignore[reportReturnType]

    def barrier(self, label: str = "barrier") -> None:
        """Wait until all ranks are here."""
        self._reduce(torch.zeros(1), torch.maximum, label)

    def flag_on_any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.flags_on_any_rank(flag)[0]

    def flags_on_any_rank(self, *flags: bool) -> tuple[bool, ...]:
        """Return whether each flag is set on any rank; every rank gives the same number of flags."""
        values = self._reduce(torch.tensor(flags, dtype=torch.int64), torch.maximum, "agreement on a flag")
        return tuple(map(bool, values.tolist()))

    def sum_over_slots(self, values: Sequence[float], label: str = "sum over slots") -> list[float]:
        """Return sums over the slots of this plane, in float64 and in one order: the same bits on every rank."""
        with self._watch.enter_operation(label, self.plane):
            return self._rounds_of_plane.reduce(_as_float64(values), torch.add, label).tolist()

    def sum_over_ranks(self, values: Sequence[float], label: str = "sum over ranks") -> list[float]:
        """Return sums over all ranks of the home, in float64 and in one order: the same bits on every rank."""
        return self._reduce(_as_float64(values), torch.add, label).tolist()

    def sum_over_stages(self, values: Sequence[float], label: str = "sum over slots") -> list[float]:
        """Return sums over the slots of all pipeline stages, in float64 and in one order."""
        if self.home.pp == 1:
            return self.sum_over_slots(values, label)
        is_counted = self.home.coordinates(self._watch.rank).tp == 0  # a slot's tensor-parallel ranks hold the same
        return self.sum_over_ranks(values if is_counted else [0.0] * len(values), label)

    def sum_array_over_ranks(self, values: Floats, label: str = "sum of arrays") -> Floats:
        """Return the sum of all ranks' arrays, element by element: the same bits on every rank.

        Large arrays go around gloo's ring, which sends each byte twice; in rounds each would be sent in every round.
        """
        total = torch.from_numpy(values).clone()
        if total.nbytes < _LARGE:
            return self._reduce(total, torch.add, label).numpy()
        with self._watch.enter_operation(label, self.home.ranks):
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.group)
        return total.numpy()

    def largest_over_ranks(self, values: Sequence[float], label: str) -> list[float]:
        """Return the largest of all ranks' values at each index of the list."""
        return self._reduce(_as_float64(values), torch.maximum, label).tolist()

    def _reduce(self, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor], label: str) -> Tensor:
        """Tensors are combined in the order of ranks."""
        if self._is_alone:
            return x
        with self._watch.enter_operation(label, self.home.ranks):
            return self._rounds.reduce(x, combine, label)

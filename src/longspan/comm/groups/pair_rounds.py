"""Small host values of many ranks, in rounds of pairs: as many messages and connections a rank as log2 of the ranks.

Gloo's own all-reduce and all-gather send around a ring, whose 2 (n - 1) messages wait for each other, and connect all
ranks to all. In round k, a member exchanges with the one whose place differs in bit k, and both combine the two values
in the order of their places: after the last round all hold the same bits. There are as many places as the largest power
of two. Where there are more members, the first ones share a place in pairs: the second gives its value to the first
before the rounds, and gets the result after them. Large arrays are for gloo's ring, which sends each byte twice.
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

T = TypeVar("T")
Exchange = Callable[..., Any]  # (member, value, *, sends=True, receives=True) -> what the member sends


class PairRounds:
    """The rounds of one member. `ranks` are the members in their order, `group` a gloo group that has all of them.

    `limit()` is how many seconds a message is waited for.

    >>> PairRounds(group, ranks=(0, 1, 2), rank=0).reduce(x, torch.maximum, "largest lengths")

    Every method is entered by all members, one call at a time. Messages match by the name of the call, its number and
    the size of its tensor, so that members which are in different calls wait, and do not take each other's values.
    """

    def __init__(
        self, group: ProcessGroup, ranks: Sequence[int], rank: int, limit: Callable[[], float] = lambda: 600.0
    ) -> None:
        """Give each rank a place: there are as many places as the largest power of two that is no more than the ranks.

        The first places have two members each, so that all ranks have one. `limit` gives the seconds of a wait.
        """
        self._group, self._ranks, self._limit = group, tuple(ranks), limit
        places = 1 << (len(ranks).bit_length() - 1)
        self._pairs = len(ranks) - places  # places of two members each, the first ones
        self._bits = [1 << k for k in range(places.bit_length() - 1)]
        index = ranks.index(rank)
        self._place, self._is_second = self._place_of(index)
        self._partner = index + (-1 if self._is_second else 1) if self._place < self._pairs else None
        self._calls, self._tag = 0, 0  # calls so far, and the tag of the messages of the last one

    def reduce(self, x: Tensor, combine: Callable[[Tensor, Tensor], Tensor], what: str) -> Tensor:
        """Combine all members' tensors of one shape and dtype, in the order of the members; all get the result."""
        self._begin_call(f"{what} of {x.nbytes} bytes")
        return self._reduce_in_rounds(x, self._exchange_tensors, combine)

    def reduce_object(self, value: T | None, combine: Callable[[T, T], T], what: str) -> T | None:
        """Reduce objects, which are pickled, as `reduce` does tensors; None is no value, and takes 8 bytes a round."""

        def combine_values(first: T | None, second: T | None) -> T | None:
            if first is None or second is None:
                return second if first is None else first
            return combine(first, second)

        self._begin_call(what)
        return self._reduce_in_rounds(value, self._exchange_objects, combine_values)

    def broadcast_object(self, value: T | None, source: int, what: str) -> T | None:
        """Return the value of the rank `source` on every rank, over the connections of the rounds.

        A source that is the second member of its place first gives the value to the first one. Then, from the highest
        bit down, each place that has the value gives it to the place that differs in that bit. Other second members get
        it last, from the first of their place.
        """
        self._begin_call(what)
        (root, from_second), exchange = self._place_of(self._ranks.index(source)), self._exchange_objects
        in_pair = from_second and root == self._place
        if in_pair and self._partner is not None:
            received = exchange(self._partner, value, sends=self._is_second, receives=not self._is_second)
            value = value if self._is_second else received
        if not self._is_second:
            for bit in reversed(self._bits):
                offset = (self._place ^ root) % (2 * bit)
                if offset in (0, bit):  # 0: this place has the value; `bit`: it gets it now
                    received = exchange(self._member(bit), value, sends=offset == 0, receives=offset == bit)
                    value = received if offset == bit else value
        if self._partner is not None and not in_pair:
            received = exchange(self._partner, value, sends=not self._is_second, receives=self._is_second)
            value = received if self._is_second else value
        return value

    def _begin_call(self, what: str) -> None:
        """Count a call, and make the tag of its messages from its number and name, by which they match."""
        self._calls += 1
        self._tag = zlib.crc32(f"{self._calls} {what}".encode()) >> 1  # gloo takes 31 bits

    def _reduce_in_rounds(self, value: Any, exchange: Exchange, combine: Callable[[Any, Any], Any]) -> Any:
        """Reduce values over all members in rounds of pairs: round i is with the member whose place differs in bit i.

        The value of the lower place is always the first of the two that are combined, so all members get the same
        result, bit for bit. Members beyond a power of two first give their value to a partner, and get the result from
        it at the end.
        """
        if self._is_second:
            exchange(self._partner, value, receives=False)
            return exchange(self._partner, value, sends=False)
        if self._partner is not None:
            value = combine(value, exchange(self._partner, value, sends=False))
        for bit in self._bits:
            partner_value = exchange(self._member(bit), value)
            value = combine(partner_value, value) if self._place & bit else combine(value, partner_value)
        if self._partner is not None:
            exchange(self._partner, value, receives=False)
        return value

    def _place_of(self, index: int) -> tuple[int, bool]:
        return (index // 2, index % 2 == 1) if index < 2 * self._pairs else (index - self._pairs, False)

    def _member(self, bit: int) -> int:
        """Return the member that this one exchanges with in a round: the first of the place with this bit flipped."""
        place = self._place ^ bit
        return 2 * place if place < self._pairs else place + self._pairs

    def _exchange_tensors(self, member: int, x: Tensor, *, sends: bool = True, receives: bool = True) -> Tensor:
        """Exchange tensors of one shape and dtype with a member; returns what arrived, or x without `receives`."""
        into = torch.empty_like(x) if receives else x
        self._send_and_receive(member, x if sends else None, into if receives else None)
        return into

    def _exchange_objects(self, member: int, value: object, *, sends: bool = True, receives: bool = True) -> Any:
        """Exchange objects with a member: their sizes, and then those that are not None."""
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
        peer = dist.get_group_rank(self._group, self._ranks[member])
        works = [self._group.recv([into], peer, self._tag)] if into is not None and into.numel() else []
        works += [self._group.send([sent], peer, self._tag)] if sent is not None and sent.numel() else []
        for work in works:
            work.wait(timedelta(seconds=self._limit()))

"""This rank's share of each group of a micro-batch, and the base of values that a micro-batch is bound to."""

from typing import Any, NoReturn, Self

from longspan.errors import CommError
from longspan.layout import Segments
from longspan.plan import Group, MicroBatch


class Immutable:
    """Attributes are set once, by `_set`. A plain class: FSDP2's mixed precision rebuilds dataclasses in keyword
    arguments and casts their tensors (torch 2.11 to 2.13)."""

    __slots__ = ()

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: bind the micro-batch again, do not set {name}")

    def __copy__(self) -> Self:
        """Itself: what never changes needs no copy."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise CommError(
            f"a {type(self).__name__} belongs to a world of this process and cannot be pickled; send its MicroBatch "
            "(or the plan) and call bind(micro_batch, world) where it arrives"
        )


class ShardPart(Immutable):
    """This rank's share of one group of a micro-batch.

    `group` and `index` (of the group in the micro-batch, −1 for padding rows), `member` (position in the group),
    `start:stop` (its rows among the shard's rows), `counts` (rows of every member).
    """

    __slots__ = ("counts", "group", "index", "member", "start", "stop", "world_key")

    group: Group
    index: int
    member: int
    start: int
    stop: int
    counts: tuple[int, ...]
    world_key: int

    def __init__(self, group: Group, index: int, slot: int, start: int, world_key: int) -> None:
        member, counts = group.slots.index(slot), group.shares.counts
        stop = start + counts[member]
        self._set(group=group, index=index, member=member, start=start, stop=stop, counts=counts, world_key=world_key)

    @property
    def degree(self) -> int:
        """Context-parallel degree of the group."""
        return self.group.degree

    def segments(self, member: int | None = None) -> Segments:
        """The rows of one member (default: this rank) as runs of positions inside documents."""
        return self.group.shares.segments(self.member if member is None else member)

    def __repr__(self) -> str:
        return f"ShardPart(group {self.index}, member {self.member} of {self.degree}, rows {self.start}:{self.stop})"


def parts_of_slot(micro_batch: MicroBatch, slot: int, world_key: int, padding: int) -> tuple[ShardPart, ...]:
    """A slot's parts of its groups, in plan order, and behind them one of `padding` rows where there are any."""
    groups = [*micro_batch.groups_of(slot)]
    if padding:
        groups.append((-1, Group(slots=(slot,), documents=(-1,), lengths=(padding,))))
    parts: list[ShardPart] = []
    for index, group in groups:
        parts.append(ShardPart(group, index, slot, parts[-1].stop if parts else 0, world_key))
    return tuple(parts)

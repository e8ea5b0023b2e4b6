"""Groups of slots that work on documents, the two levels of hierarchical ones, and the micro-batches they make up."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

from longspan.layout import Partition

CommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"]
PartitionKind = Literal["zigzag", "contiguous"]
PARTITIONS: tuple[PartitionKind, ...] = get_args(PartitionKind)
Mode = Literal["lockstep", "free"]


@dataclass(frozen=True)
class Group:
    """Slots that share documents in one micro-batch, with all that `bind` needs.

    `slots` in ring order; `documents` are ids into the plan's lengths, `lengths` their rows, in packed order.
    `cp_comm_type` is one string, or one per model layer. `pad_to` lays every document out as that many rows
    (the classical padded batch); None lays each out as it is. `parents` make prefix trees (docs/shared-prefixes.md): of
    each document the index, in `documents`, of the one whose rows come before its own, −1 for none; a document stands
    behind its parent, and between both only descendants of the parent.
    """

    slots: tuple[int, ...]
    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    cp_comm_type: str | tuple[str, ...] = "p2p"
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    partition: PartitionKind = "zigzag"
    pad_to: int | None = None
    parents: tuple[int, ...] | None = None

    @property
    def _parents(self) -> tuple[int, ...]:
        return self.parents or (-1,) * len(self.lengths)

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """How many rows come before each document's own: those of its parent, of that one's parent, and so on."""
        bases = list[int]()
        for parent in self._parents:
            bases.append(0 if parent < 0 else bases[parent] + self.lengths[parent])
        return tuple(bases)

    @cached_property
    def path_lengths(self) -> tuple[int, ...]:
        """The rows of each document's path: its own, and those before them (`bases`)."""
        if self.parents is None:
            return self.lengths
        return tuple(base + length for base, length in zip(self.bases, self.lengths, strict=True))

    @cached_property
    def longest_paths(self) -> tuple[int, ...]:
        """For each document the rows of the longest path (`path_lengths`) that goes through it: its own, or that of a
        document that continues it.
        """
        longest = list(self.path_lengths)
        for index, parent in reversed([*enumerate(self._parents)]):  # parents come first
            if parent >= 0:
                longest[parent] = max(longest[parent], longest[index])
        return tuple(longest)

    @cached_property
    def leaf_counts(self) -> tuple[int, ...]:
        """For each document how many leaves continue it, directly or through others; 1 for a leaf, which no document
        continues.
        """
        counts = [0] * len(self.lengths)
        for index, parent in reversed([*enumerate(self._parents)]):  # parents come first
            counts[index] = counts[index] or 1
            if parent >= 0:
                counts[parent] += counts[index]
        return tuple(counts)

    def ancestors(self) -> Iterator[tuple[int, ...]]:
        """Yield for each generation, that of the roots first, every document's ancestor in it: the index of a document
        of the group, −1 where it has none. Nothing is yielded for a group without parents.
        """
        paths = list[tuple[int, ...]]()
        for parent in self.parents or ():
            paths.append(() if parent < 0 else (*paths[parent], parent))
        for generation in range(max(map(len, paths), default=0)):
            yield tuple(path[generation] if generation < len(path) else -1 for path in paths)

    @property
    def degree(self) -> int:
        """Context-parallel degree: how many slots share the rows."""
        return len(self.slots)

    @property
    def tokens(self) -> int:
        """Rows of the documents, without padding."""
        return sum(self.lengths)

    @property
    def laid_out(self) -> tuple[int, ...]:
        """Rows that each document takes, padding included."""
        return self.lengths if self.pad_to is None else (self.pad_to,) * len(self.lengths)

    @property
    def rows_per_slot(self) -> int:
        """The most rows that one member holds, padding included: ceil(laid-out rows / degree)."""
        return -(-sum(self.laid_out) // self.degree)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON document: `cp_comm_type`, and all others that are not at their default."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {
            field.name: value for field, value in values if value != field.default or field.name == "cp_comm_type"
        }

    @cached_property
    def shares(self) -> Partition:
        """Who holds which laid-out rows; rows count through the documents in order, padding included."""
        make = Partition.zigzag if self.partition == "zigzag" else Partition.contiguous
        return make(self.laid_out, self.degree)


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass: groups in the one order in which every slot takes them.

    A slot may be in several groups. A slot that is in none runs a dummy pass in lockstep and skips in free mode.
    """

    groups: tuple[Group, ...] = ()

    @property
    def tokens(self) -> int:
        """Rows of all documents of this micro-batch, without padding: S."""
        return sum(group.tokens for group in self.groups)

    @property
    def documents(self) -> tuple[int, ...]:
        """Document ids in packed order, group by group."""
        return tuple(d for group in self.groups for d in group.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Document lengths in packed order, group by group."""
        return tuple(n for group in self.groups for n in group.lengths)

    @property
    def path_lengths(self) -> tuple[int, ...]:
        """The rows of each document's path (`Group.path_lengths`), in packed order."""
        return tuple(n for group in self.groups for n in group.path_lengths)

    def groups_of(self, slot: int) -> tuple[tuple[int, Group], ...]:
        """Return the groups that a slot is in, with their index, in order."""
        return self._groups_of_slots.get(slot, ())

    @cached_property
    def _groups_of_slots(self) -> dict[int, tuple[tuple[int, Group], ...]]:
        groups = dict[int, list[tuple[int, Group]]]()
        for index, group in enumerate(self.groups):
            for slot in group.slots:
                groups.setdefault(slot, []).append((index, group))
        return {slot: tuple(of_slot) for slot, of_slot in groups.items()}

    @property
    def most_rows(self) -> int:
        """The rows of the slot that holds most, padding included, over all groups that it is in."""
        rows = dict[int, int]()
        for group in self.groups:
            for slot in group.slots:
                rows[slot] = rows.get(slot, 0) + group.rows_per_slot
        return max(rows.values(), default=0)


def most_common_type(types: str | Sequence[str]) -> str:
    """Return the communication type that most layers of a list have, or the one type."""
    return types if isinstance(types, str) else max(types, key=types.count)


def first_size(sizes: int | Sequence[int]) -> int:
    """Return the a2a size of the sizes of a2a+p2p: of a pair (a2a, p2p), or given alone."""
    return sizes if isinstance(sizes, int) else sizes[0]


def fit_level_sizes(sizes: int | Sequence[int], degree: int) -> tuple[int, int]:
    """Fit the configured sizes (a2a, p2p), or only the a2a size, to a group of this degree: the a2a size becomes the
    largest number that divides the configured one and the degree.
    """
    inner = math.gcd(first_size(sizes), degree)
    return inner, degree // inner


def comm_type_text(types: str | Sequence[str], sizes: Iterable[int | Sequence[int] | None] = ()) -> str:
    """Write a communication type, or the different ones of a list. With a2a+p2p among them its levels (a2a, p2p) follow
    if all `sizes` are the same, else the widest a2a of these.
    """
    name = types if isinstance(types, str) else "/".join(dict.fromkeys(types))
    levels = sorted({tuple(s) for s in sizes if s is not None and not isinstance(s, int)})
    if "a2a+p2p" not in name or not levels:
        return name
    if len(levels) == 1:
        return f"{name} {levels[0]}"
    return f"{name}, a2a of {levels[-1][0]} at most"

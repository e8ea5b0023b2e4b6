"""The two levels of hierarchical groups (`a2a+p2p`): which slots exchange heads, and which stand in a ring."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longspan.errors import PlanError
from longspan.plan.micro_batch import Group
from longspan.plan.plan import Plan

Slots = tuple[int, ...]


@dataclass(frozen=True)
class Levels:
    """Level one, `a2a`: runs of neighbouring members. Level two, `p2p`: every a2a-th member.

    >>> group_levels(Group((0, 1, 2, 3), (0,), (64,), "a2a+p2p", (2, 2)))
    Levels(a2a=((0, 1), (2, 3)), p2p=((0, 2), (1, 3)))
    """

    a2a: tuple[Slots, ...]
    p2p: tuple[Slots, ...]

    def __str__(self) -> str:
        """Name the slots that exchange heads, and those that stand in a ring: "level one, a2a: (0, 1) (2, 3); …"."""
        inner, outer = (
            " ".join(f"({', '.join(map(str, slots))})" for slots in level) for level in (self.a2a, self.p2p)
        )
        return f"level one, a2a: {inner}; level two, p2p: {outer}"


def group_levels(group: Group) -> Levels:
    """Return the levels of a group. Raises PlanError if it has no sizes, or sizes whose product is not its degree."""
    sizes, slots = group.hierarchical_context_parallel_sizes, group.slots
    if sizes is None or sizes[0] * sizes[1] != len(slots):
        raise PlanError(
            f"hierarchical_context_parallel_sizes {sizes} do not make the degree {len(slots)} of slots {slots}"
        )
    inner = sizes[0]
    return Levels(
        tuple(slots[first : first + inner] for first in range(0, len(slots), inner)),
        tuple(slots[i::inner] for i in range(inner)),
    )


def level_sizes(sizes: int | Sequence[int], degree: int) -> tuple[int, int]:
    """Fit the configured sizes (a2a, p2p), or only the a2a size, to a group of this degree.

    Groups of a plan may have other degrees than the configured product: the a2a size becomes the largest number that
    divides the configured one and the degree.

    >>> level_sizes((4, 2), 6), level_sizes(2, 8)
    ((2, 3), (2, 4))
    """
    inner = math.gcd(sizes if isinstance(sizes, int) else sizes[0], degree)
    return inner, degree // inner


def hierarchical_groups(plan: Plan) -> Iterator[Group]:
    """Yield the groups of a plan that have two levels, in plan order; of those with equal slots and sizes the first."""
    seen: set[tuple[Slots, object]] = set()
    for batch in plan.micro_batches:
        for group in batch.groups:
            types = (group.cp_comm_type,) if isinstance(group.cp_comm_type, str) else group.cp_comm_type
            key = (group.slots, group.hierarchical_context_parallel_sizes)
            if group.degree > 1 and "a2a+p2p" in types and key not in seen:
                seen.add(key)
                yield group

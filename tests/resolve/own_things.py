"""Planners and a cost of one's own, good and bad, as a user's module would have them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from longspan.layout import Layout
from longspan.plan import Cost, Group, MicroBatch, Plan, PlanOptions, plan_fixed


def one_by_one(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """Every document on all slots, in a micro-batch of its own; the rest is left to the options."""
    everyone = tuple(range(home.slots))
    groups = [Group(everyone, (d,), (n,), options.cp_comm_type) for d, n in enumerate(lengths)]
    return Plan(home.slots, tuple(lengths), tuple(MicroBatch((group,)) for group in groups), targets=0)


one_degree = partial(plan_fixed, cp=2)  # as a function with an argument set


def nothing(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> None:
    """No plan."""


def fails(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """A mistake of the user's."""
    raise KeyError("slots")


def sorted_lengths(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """A plan of documents in another order."""
    return one_by_one(sorted(lengths), home, options=options)


def fewer_slots(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """A plan of another home."""
    return one_by_one(lengths, Layout(1), options=options)


def all_on_one_slot(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """Too many rows."""
    group = Group((0,), tuple(range(len(lengths))), tuple(lengths))
    return Plan(home.slots, tuple(lengths), (MicroBatch((group,)),), targets=0)


def left_out(lengths: Sequence[int], home: Layout, *, options: PlanOptions) -> Plan:
    """A document in no group."""
    plan = one_by_one(lengths, home, options=options)
    return replace(plan, micro_batches=plan.micro_batches[:-1])


@dataclass(frozen=True, kw_only=True)
class Slow(Cost):
    """Groups of several slots take some seconds more."""

    more: float = 0.0

    def group_seconds(self, tokens: Any, squares: Any, degree: Any, *arguments: Any, **keywords: Any) -> Any:
        """As of `Cost`, and more; of a choice the least of all types or sizes, each with more."""
        seconds = super().group_seconds(tokens, squares, degree, *arguments, **keywords)
        return seconds if self.has_choice else seconds + self.more * (np.asarray(degree) > 1)


slow = Slow(more=5.0, source="a slow network")
number = 3.0

"""One step as a value: which slots work together on which documents, micro-batch by micro-batch.

It is checked and printed here, and the same on every rank. Whether a model can run it is checked in `attention`.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from longspan.errors import LayoutError, PlanError, plural
from longspan.layout import check_lengths
from longspan.plan.check import MODES, check_choice, check_comm_types, check_count, check_hierarchy, check_size
from longspan.plan.cost.bound import lower_bound_seconds
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.micro_batch import PARTITIONS, Group, MicroBatch, Mode
from longspan.plan.plan_json import read_plan_fields
from longspan.plan.step_times import Timeline, slot_rows, timeline

NO_MACHINE = "no machine: seconds only say how the parts of plans compare"


@dataclass(frozen=True)
class Plan:
    """One step: which slots work together on which documents in which micro-batch.

    `lengths[d]` is the number of rows of document d; `targets` the number of predicted tokens by which the loss is
    divided; `predicted_seconds` the step's time under `cost`; `lower_bound_seconds` a time that no plan of these
    documents under that cost and cap can beat (0.0 for both if a plan was built by hand without a cost).

    Planners return checked plans; `check` checks one that was built by hand.
    """

    slots: int
    lengths: tuple[int, ...]
    micro_batches: tuple[MicroBatch, ...]
    targets: int
    mode: Mode = "lockstep"
    max_tokens_per_slot: int | None = None
    node_size: int = 8
    row_multiple: int = 1
    planner: str = "given"
    predicted_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    cost: Cost = DEFAULT_COST

    @property
    def tokens(self) -> int:
        """Rows of all documents."""
        return sum(self.lengths)

    @property
    def ratio(self) -> float:
        """Predicted time over the lower bound, at least 1; nan if the plan has no bound."""
        return self.predicted_seconds / self.lower_bound_seconds if self.lower_bound_seconds else float("nan")

    @cached_property
    def efficiency(self) -> float:
        """Return the share of rows in use, from 0 to 1: tokens / (slots x micro-batches x rows of the fullest slot).

        A plan that is balanced by time need not fill its slots.
        """
        rows = slot_rows(self.micro_batches, self.slots, self.row_multiple)
        return self.tokens / (rows.size * int(rows.max())) if rows.any() else 0.0

    @cached_property
    def most_rows(self) -> int:
        """The rows of the fullest slot in any micro-batch, in whole multiples of `row_multiple`."""
        return int(slot_rows(self.micro_batches, self.slots, self.row_multiple).max(initial=0))

    def timeline(self, cost: Cost | None = None) -> Timeline:
        """Return when each slot works in each micro-batch, under the plan's own cost or another on its own stages."""
        cost = replace(cost or self.cost, stages=self.cost.stages, chunks=self.cost.chunks)
        batches, slots = self.micro_batches, self.slots
        return timeline(batches, slots, cost, mode=self.mode, node_size=self.node_size, row_multiple=self.row_multiple)

    def reprice(self, cost: Cost, *, max_cp: int | None = None) -> "Plan":
        """Return this plan with the seconds and the bound that it has under another cost, its stages included.

        >>> plan.reprice(Cost.for_model("Qwen3-8B", tflops=800)).predicted_seconds  # doctest: +SKIP

        The bound is of plans with groups of the type that this plan was made for, up to degree `max_cp` (None: slots).
        """
        plan = replace(self, cost=cost)
        kinds = cost.under(self.cost.cp_comm_type, self.cost.a2a_size, heads=self.cost.heads)
        bound = lower_bound_seconds(
            self.lengths,
            self.slots,
            self.max_tokens_per_slot,
            kinds,
            self.mode,
            max_cp=max_cp,
            node_size=self.node_size,
        ).seconds
        bound += cost.update_seconds + (cost.closing_seconds if self.mode == "free" else 0.0)
        return replace(plan, predicted_seconds=plan.timeline().step_seconds, lower_bound_seconds=bound)

    def digest(self) -> str:
        """Return SHA-256 (hex) of the integers and strings: what ranks compare before the first collective of a step.

        Times and the cost are left out: two hosts may round them differently without disagreeing on what to do.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self._fields_for_digest(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON; `Plan.from_json` gives an equal plan back."""
        seconds = {"predicted_seconds": self.predicted_seconds, "lower_bound_seconds": self.lower_bound_seconds}
        further_fields = {"tokens": self.tokens} | seconds | {"cost": self.cost.to_json()}
        return json.dumps(self._fields_for_digest() | further_fields, indent=indent)

    def _fields_for_digest(self) -> dict[str, Any]:
        names = ("slots", "lengths", "targets", "mode", "max_tokens_per_slot", "node_size", "row_multiple", "planner")
        batches = [[group.to_dict() for group in batch.groups] for batch in self.micro_batches]
        return {name: getattr(self, name) for name in names} | {"micro_batches": batches}

    def table(self, cost: Cost | None = None, limit: int = 24) -> str:
        """Return the plan as plain text: its sizes and times, then a line for each of at most `limit` micro-batches."""
        times = self.timeline(cost)
        return "\n".join([*_header_lines(self, cost or self.cost, times), "", *_micro_batch_lines(self, times, limit)])

    def check(self) -> "Plan":
        """Return this plan if it is sound: every document once, slots in range, caps met, types that exist.

        Raises PlanError naming the document, slot or micro-batch, and the numbers.
        """
        _check_plan_numbers(self)
        for m, batch in enumerate(self.micro_batches):
            for index, group in enumerate(batch.groups):
                _check_group(f"micro-batch {m}, group {index}", group, self)
        _check_documents(self)
        pads = [group.pad_to or 0 for batch in self.micro_batches for group in batch.groups]  # priced as rows too
        check_size(len(self.lengths), max((*pads, *self.lengths), default=0))
        _check_cap(self)
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Return the checked plan that `to_json` wrote. Raises PlanError naming the part that is missing or wrong."""
        fields, tokens = read_plan_fields(text)
        plan = cls(**fields).check()
        if tokens is not None and tokens != plan.tokens:
            raise PlanError(f"the plan says {tokens!r} tokens, but its lengths add up to {plan.tokens}")
        return plan


def _check_plan_numbers(plan: Plan) -> None:
    for name in ("slots", "node_size", "row_multiple"):
        check_count(name, getattr(plan, name))
    check_count("targets", plan.targets, least=0)
    if plan.max_tokens_per_slot is not None:
        check_count("max_tokens_per_slot", plan.max_tokens_per_slot)
    check_choice("mode", plan.mode, MODES)
    try:
        if check_lengths(plan.lengths) != plan.lengths:
            raise PlanError(f"the plan's lengths must be a tuple of int, got {type(plan.lengths).__name__}")
    except LayoutError as error:
        raise PlanError(f"the plan's lengths: {error}") from None
    if not plan.micro_batches:
        raise PlanError("the plan has no micro-batch; a step has at least one, if only a dummy")


def _check_group(where: str, group: Group, plan: Plan) -> None:
    if not group.slots or not group.documents:
        missing = "slots" if group.documents else "documents"
        raise PlanError(f"{where} has no {missing}; leave the group out: a slot in no group runs a dummy pass")
    for name in ("slots", "documents", "lengths"):
        if set(map(type, getattr(group, name))) != {int}:
            raise PlanError(f"{where}: {name} {_excerpt(getattr(group, name))} must be integers (int, not numpy's)")
    if len(set(group.slots)) != len(group.slots):
        raise PlanError(f"{where} names a slot twice: slots {_excerpt(group.slots)}")
    if min(group.slots) < 0 or max(group.slots) >= plan.slots:
        raise PlanError(f"{where} has slots {_excerpt(group.slots)}, but the plan has slots 0 to {plan.slots - 1}")
    _check_group_lengths(where, group, plan)
    check_choice(f"{where}: partition", group.partition, PARTITIONS)
    try:
        types = check_comm_types(group.cp_comm_type)
        check_hierarchy(types, group.hierarchical_context_parallel_sizes, group.degree)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def _check_group_lengths(where: str, group: Group, plan: Plan) -> None:
    if len(group.documents) != len(group.lengths):
        raise PlanError(f"{where} has {len(group.documents)} documents and {len(group.lengths)} lengths")
    if min(group.documents) < 0 or max(group.documents) >= len(plan.lengths):
        possible = f"documents 0 to {len(plan.lengths) - 1}" if plan.lengths else "no documents"
        raise PlanError(f"{where} has documents {_excerpt(group.documents)}, but the plan has {possible}")
    for document, length in zip(group.documents, group.lengths, strict=True):
        if plan.lengths[document] != length:
            raise PlanError(
                f"{where} gives document {document} {length} rows, but the plan's lengths say {plan.lengths[document]}"
            )
    if group.pad_to is not None and (type(group.pad_to) is not int or group.pad_to < max(group.lengths)):
        raise PlanError(f"{where} pads to {group.pad_to!r} rows, less than its longest document, {max(group.lengths)}")


def _check_documents(plan: Plan) -> None:
    documents = np.array([d for batch in plan.micro_batches for d in batch.documents], dtype=np.int64)
    times = np.bincount(documents, minlength=len(plan.lengths))
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        d = int(wrong[0])
        places = [m for m, batch in enumerate(plan.micro_batches) if d in batch.documents]
        seen = f"{times[d]} times (micro-batches {_excerpt(places)})" if places else "in no micro-batch"
        raise PlanError(
            f"document {d} ({plan.lengths[d]} rows) is {seen}, and must be in exactly one group; "
            f"{len(wrong)} of {len(plan.lengths)} documents are wrong"
        )


def _check_cap(plan: Plan) -> None:
    cap = plan.max_tokens_per_slot
    if cap is None:
        return
    rows = slot_rows(plan.micro_batches, plan.slots, plan.row_multiple)
    above_cap = np.argwhere(rows > cap)
    if len(above_cap):
        m, slot = (int(i) for i in above_cap[0])
        groups = [index for index, _ in plan.micro_batches[m].groups_of(slot)]
        rounded = f" in multiples of {plan.row_multiple}" if plan.row_multiple > 1 else ""
        raise PlanError(
            f"slot {slot} holds {rows[m, slot]} rows{rounded} in micro-batch {m} (groups {_excerpt(groups)}), above "
            f"max_tokens_per_slot {cap}; {len(above_cap)} of {rows.size} places are above it"
        )


def _excerpt(values: Sequence[object], limit: int = 8) -> str:
    head = ", ".join(str(value) for value in values[:limit])
    return f"({head}, … {len(values)} in all)" if len(values) > limit else f"({head})"


def _header_lines(plan: Plan, cost: Cost, times: Timeline) -> list[str]:
    cap = f"at most {plan.max_tokens_per_slot:,}" if plan.max_tokens_per_slot else "no limit on"
    lengths = sorted(plan.lengths)
    median = f", median {lengths[len(lengths) // 2]:,}" if lengths else ""
    spread = f"{lengths[0]:,} to {lengths[-1]:,} rows{median}" if lengths else "none"
    fullest, bound, seconds = int(times.rows.max(initial=0)), plan.lower_bound_seconds, times.step_seconds
    ratio = f"{seconds / bound:.3f} x the lower bound of {_seconds_text(bound)}" if bound else "no lower bound"
    lines = [
        f"{plan.planner} plan, {plan.mode}: {plural(plan.slots, 'slot')}, "
        f"{plural(len(plan.micro_batches), 'micro-batch', 'es')}, {cap} rows a slot",
        f"  documents   {len(plan.lengths):>14,}   {spread}",
        f"  tokens      {plan.tokens:>14,}   {plan.targets:,} targets",
        f"  predicted   {_seconds_text(seconds):>14}   {ratio}",
        f"  priced for  {cost.source or NO_MACHINE}",
    ]
    if plan.mode == "free" and cost.closing_seconds:  # in lockstep every micro-batch gathers and sums
        closing, share = _seconds_text(cost.closing_seconds), cost.closing_seconds / seconds
        lines.append(f"  closing     {closing:>14}   {share:.1%} of it: parameters gathered, gradients summed")
    used = f"of slots x micro-batches x the fullest slot's {fullest:,} rows"
    return [*lines, f"  rows used   {plan.efficiency:>14.1%}   {used}"]


def _micro_batch_lines(plan: Plan, times: Timeline, limit: int) -> list[str]:
    """Return a line for each micro-batch; of more than `limit` + 1 only the first and the last, `limit` in all.

    Two thirds of these are the first ones. With `limit` + 1 all are shown: the line that says how many are left out
    would take the place of a single one.
    """
    count = len(plan.micro_batches)
    shown = (
        list(range(count)) if count <= limit + 1 else [*range(limit - limit // 3), *range(count - limit // 3, count)]
    )
    groups = {m: _degrees_text(plan.micro_batches[m]) for m in shown}
    width = max(len("groups"), *map(len, groups.values()))
    lines = [f"  micro-batch   {'groups':<{width}}   {'tokens':>11}   fullest slot      seconds    idle"]
    for previous, m in zip([-1, *shown], shown, strict=False):
        if m - previous > 1:
            lines.append(f"            …   {plural(m - previous - 1, 'more micro-batch', 'es')}")
        batch, longest_text = plan.micro_batches[m], _seconds_text(float(np.max(times.busy[m], initial=0.0)))
        lines.append(
            f"  {m:>11}   {groups[m]:<{width}}   {batch.tokens:>11,}   {int(times.rows[m].max()):>12,}"
            f"   {longest_text:>10}   {times.idle[m]:>5.1%}"
        )
    return lines


def _degrees_text(batch: MicroBatch, most: int = 4) -> str:
    """Name the groups by degree, widest first, as in '2 x cp 8, 16 x cp 1'; "dummy" if there are none.

    Of the degrees after the `most` widest only the number of groups is written.
    """
    counts = sorted(Counter(group.degree for group in batch.groups).items(), reverse=True)
    texts = [f"{count} x cp {degree}" for degree, count in counts]
    other_groups = sum(count for _, count in counts[most:])
    return ", ".join(texts[:most]) + (f", {other_groups} more" if other_groups else "") or "dummy"


def _seconds_text(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value * scale >= 0.1:
            return f"{value * scale:,.3f} {unit}"
    return f"{value * 1e6:,.1f} us"

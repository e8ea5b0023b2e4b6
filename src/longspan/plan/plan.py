"""One step as a value: which slots work together on which documents, micro-batch by micro-batch.

It is checked and printed here, and the same on every rank. Whether a model can run it is checked in `attention`.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from longspan.errors import LayoutError, PlanError, plural
from longspan.files import parse_json
from longspan.layout import check_lengths
from longspan.plain_text import excerpt, items_text, seconds_text, text_table
from longspan.plan.check import (
    MODES,
    check_choice,
    check_comm_types,
    check_count,
    check_hierarchical_sizes,
    check_number,
    check_work_fits_int64,
)
from longspan.plan.cost.cost import DEFAULT_COST, DEFAULT_SOURCE, Cost
from longspan.plan.micro_batch import PARTITIONS, Group, MicroBatch, Mode, comm_type_text
from longspan.plan.step_times import Timeline, lower_bound_seconds, slot_rows, timeline

NO_MACHINE = "no machine: seconds only say how the parts of plans compare"
DEFAULT_COST_NOTE = (
    ', the default: cost=Machine.known("h100").cost("FOLDER"), or --machine h100 --model FOLDER, prices yours'
)


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
    def groups(self) -> tuple[Group, ...]:
        """The groups of all micro-batches, in order."""
        return tuple(group for batch in self.micro_batches for group in batch.groups)

    @cached_property
    def parents(self) -> tuple[int, ...] | None:
        """For each document the one whose rows come before its own, −1 for none; None: no documents share a prefix."""
        if all(group.parents is None for group in self.groups):
            return None
        parents = [-1] * len(self.lengths)
        for group in self.groups:
            for document, parent in zip(group.documents, group.parents or (), strict=False):
                parents[document] = -1 if parent < 0 else group.documents[parent]
        return tuple(parents)

    @cached_property
    def bases(self) -> tuple[int, ...]:
        """How many rows come before each document's own (`Group.bases`); () where no documents share a prefix."""
        if self.parents is None:
            return ()
        by_document = {
            d: base for group in self.groups for d, base in zip(group.documents, group.bases, strict=True)
        }
        return tuple(by_document[document] for document in range(len(self.lengths)))

    @cached_property
    def path_lengths(self) -> tuple[int, ...]:
        """The rows of each document's path: its own, and those before them (`bases`)."""
        if self.parents is None:
            return self.lengths
        return tuple(base + rows for base, rows in zip(self.bases, self.lengths, strict=True))

    @property
    def whole_documents(self) -> tuple[int, ...]:
        """The documents that no other continues: the last part of each document that was to be planned."""
        prefixes = set(self.parents or ())
        return tuple(document for document in range(len(self.lengths)) if document not in prefixes)

    @property
    def separate_tokens(self) -> int:
        """The rows that the documents would have if each had its own copy of its prefix."""
        return sum(self.path_lengths[document] for document in self.whole_documents)

    @property
    def spared_rows(self) -> int:
        """The rows that shared prefixes save: `separate_tokens` less `tokens`."""
        return self.separate_tokens - self.tokens

    @property
    def ratio(self) -> float:
        """Predicted time over the lower bound, at least 1; nan if the plan has no bound."""
        if self.lower_bound_seconds:
            return self.predicted_seconds / self.lower_bound_seconds
        return float("nan")

    @cached_property
    def efficiency(self) -> float:
        """The share of rows in use, from 0 to 1: tokens / (slots x micro-batches x rows of the fullest slot)."""
        rows = slot_rows(self.micro_batches, self.slots, self.row_multiple)
        return self.tokens / (rows.size * int(rows.max())) if rows.any() else 0.0

    @cached_property
    def most_rows(self) -> int:
        """The rows of the fullest slot in any micro-batch, in whole multiples of `row_multiple`."""
        return int(slot_rows(self.micro_batches, self.slots, self.row_multiple).max(initial=0))

    def timeline(self, cost: Cost | None = None) -> Timeline:
        """Return when each slot works in each micro-batch, under `cost` (None: the plan's own). The pipeline stages and
        model chunks are those of the plan's own cost in either case.
        """
        cost_of_stages = replace(cost or self.cost, stages=self.cost.stages, chunks=self.cost.chunks)
        return timeline(
            self.micro_batches,
            self.slots,
            cost_of_stages,
            mode=self.mode,
            node_size=self.node_size,
            row_multiple=self.row_multiple,
        )

    def reprice(self, cost: Cost, *, max_cp: int | None = None) -> "Plan":
        """Return this plan with another cost, whose stages it takes too, and with its seconds and its bound under that.
        The bound is of plans with groups of the type that this plan was made for, up to degree `max_cp` (None: slots).
        """
        plan = replace(self, cost=cost)
        cost_of_bound = cost.under(self.cost.cp_comm_type, self.cost.a2a_size, heads=self.cost.heads)
        bound = lower_bound_seconds(
            self.lengths,
            self.slots,
            self.max_tokens_per_slot,
            cost_of_bound,
            self.mode,
            max_cp=max_cp,
            node_size=self.node_size,
            bases=self.bases,
        ).seconds
        bound += cost.update_seconds + cost.closing_seconds
        return replace(plan, predicted_seconds=plan.timeline().step_seconds, lower_bound_seconds=bound)

    def digest(self) -> str:
        """Return SHA-256 (hex) of the integers and strings: what ranks compare before the first collective of a step.
        Times and the cost are left out: two hosts may round them differently.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self._fields_for_digest(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON; `Plan.from_json` gives an equal plan back."""
        seconds = {name: getattr(self, name) for name in PLAN_SECONDS}
        further_fields = {"tokens": self.tokens, **seconds, "cost": self.cost.to_json()}
        return json.dumps(self._fields_for_digest() | further_fields, indent=indent)

    def _fields_for_digest(self) -> dict[str, Any]:
        """Lists and dicts of integers and strings in a fixed order: all that ranks must agree on."""
        numbers = {name: getattr(self, name) for name in PLAN_NUMBERS}
        batches = [[group.to_dict() for group in batch.groups] for batch in self.micro_batches]
        return {"slots": self.slots, "lengths": self.lengths} | numbers | {"micro_batches": batches}

    def table(self, cost: Cost | None = None, limit: int = 24) -> str:
        """Return the plan as plain text: its sizes and times, then a line for each of at most `limit` micro-batches."""
        times = self.timeline(cost)
        rows = list[tuple[str, ...]]()
        for m, batch in enumerate(self.micro_batches[:limit]):
            fullest = f"{int(times.rows[m].max()):,}"
            seconds = seconds_text(float(np.max(times.busy[m], initial=0.0)))
            # groups by degree, the widest four first
            counts = sorted(Counter(group.degree for group in batch.groups).items(), reverse=True)
            degrees = [f"{count} x cp {degree}" for degree, count in counts[:4]]
            if counts[4:]:
                degrees.append(f"{sum(count for _, count in counts[4:])} more")
            groups = ", ".join(degrees) or "dummy"
            rows.append((f"{m}", groups, f"{batch.tokens:,}", fullest, seconds, f"{times.idle[m]:.1%}"))
        names = ("micro-batch", "groups", "tokens", "fullest slot", "seconds", "idle")
        others = max(0, len(self.micro_batches) - limit)
        lines = [*_header_lines(self, cost or self.cost, times), "", text_table(names, rows, left=2)]
        if others:
            lines.append(plural(others, "more micro-batch", "es"))
        return "\n".join(lines)

    def check(self) -> "Plan":
        """Return this plan if it is sound: every document once, slots in range, caps met, types that exist. Raises
        PlanError naming the document, slot or micro-batch, and the numbers.
        """
        for name in ("slots", "node_size", "row_multiple"):
            check_count(name, getattr(self, name))
        check_count("targets", self.targets, least=0)
        cap = self.max_tokens_per_slot
        if cap is not None:
            check_count("max_tokens_per_slot", cap)
        check_choice("mode", self.mode, MODES)
        for name in PLAN_SECONDS:
            check_number(name, getattr(self, name))
        try:
            if check_lengths(self.lengths) != self.lengths:
                raise PlanError(f"the plan's lengths must be a tuple of int, got {type(self.lengths).__name__}")
        except LayoutError as error:
            raise PlanError(f"the plan's lengths: {error}") from None
        if not self.micro_batches:
            raise PlanError("the plan has no micro-batch; a step has at least one, if only a dummy")
        for m, batch in enumerate(self.micro_batches):
            for index, group in enumerate(batch.groups):
                _check_group(f"micro-batch {m}, group {index}", group, self)
        # Each document is in one group; the groups name documents of the plan only, as they were checked before.
        documents = np.array([d for group in self.groups for d in group.documents], dtype=np.int64)
        appearances = np.bincount(documents, minlength=len(self.lengths))
        wrong = np.flatnonzero(appearances != 1)
        if len(wrong):
            d = int(wrong[0])
            places = [m for m, batch in enumerate(self.micro_batches) if d in batch.documents]
            seen = f"{appearances[d]} times (micro-batches {excerpt(places)})" if places else "in no micro-batch"
            raise PlanError(
                f"document {d} ({self.lengths[d]} rows) is {seen}, and must be in exactly one group; "
                f"{len(wrong)} of {len(self.lengths)} documents are wrong"
            )
        pads = [group.pad_to or 0 for group in self.groups]  # rows of padding are priced too
        check_work_fits_int64(len(self.lengths), max((*pads, *self.lengths), default=0))
        if cap is None:
            return self
        rows = slot_rows(self.micro_batches, self.slots, self.row_multiple)
        above_cap = np.argwhere(rows > cap)
        if len(above_cap):
            m, slot = (int(i) for i in above_cap[0])
            groups = [index for index, _ in self.micro_batches[m].groups_of(slot)]
            rounded = f" in multiples of {self.row_multiple}" if self.row_multiple > 1 else ""
            raise PlanError(
                f"slot {slot} holds {rows[m, slot]} rows{rounded} in micro-batch {m} (groups {excerpt(groups)}), above "
                f"max_tokens_per_slot {cap}; {len(above_cap)} of {rows.size} places are above it"
            )
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Return the checked plan that `to_json` wrote. Fields with a default may be left out, and so may a group's
        lengths, and `targets` (then all tokens but each document's first). Raises PlanError naming what is missing or
        wrong.
        """
        try:
            values: dict[str, Any] = dict(parse_json(text))
            tokens = values.pop("tokens", None)
            lengths = tuple(values["lengths"])
            batches = list[MicroBatch]()
            for batch in values["micro_batches"]:
                groups = list[Group]()
                for group in batch:
                    fields: dict[str, Any] = {name: list_as_tuple(value) for name, value in group.items()}
                    fields.setdefault("lengths", tuple(lengths[d] for d in fields["documents"]))
                    groups.append(Group(**fields))
                batches.append(MicroBatch(tuple(groups)))
            cost = Cost.from_json(values.get("cost", {}))
            values |= {"lengths": lengths, "micro_batches": tuple(batches), "cost": cost}
            values.setdefault("targets", sum(lengths) - len(lengths))
            plan = cls(**values).check()
        except PlanError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise PlanError(f"a plan must be JSON as Plan.to_json writes it: {reason}") from None
        if tokens not in (None, plan.tokens):
            raise PlanError(f"the plan says {tokens!r} tokens, but its lengths add up to {plan.tokens}")
        return plan


def _check_group(where: str, group: Group, plan: Plan) -> None:
    """The error begins with `where`."""
    if not group.slots or not group.documents:
        missing = "slots" if group.documents else "documents"
        raise PlanError(f"{where} has no {missing}; leave the group out: a slot in no group runs a dummy pass")
    for name in ("slots", "documents", "lengths"):
        if {type(value) for value in getattr(group, name)} != {int}:
            raise PlanError(
                f"{where}: {name} ({items_text(getattr(group, name))}) must be integers (int, not numpy's)"
            )
    if len(set(group.slots)) != len(group.slots):
        raise PlanError(f"{where} names a slot twice: slots {excerpt(group.slots)}")
    if min(group.slots) < 0 or max(group.slots) >= plan.slots:
        raise PlanError(f"{where} has slots {excerpt(group.slots)}, but the plan has slots 0 to {plan.slots - 1}")
    if len(group.documents) != len(group.lengths):
        raise PlanError(f"{where} has {len(group.documents)} documents and {len(group.lengths)} lengths")
    if min(group.documents) < 0 or max(group.documents) >= len(plan.lengths):
        possible = f"documents 0 to {len(plan.lengths) - 1}" if plan.lengths else "no documents"
        raise PlanError(f"{where} has documents {excerpt(group.documents)}, but the plan has {possible}")
    for document, length in zip(group.documents, group.lengths, strict=True):
        if plan.lengths[document] != length:
            raise PlanError(
                f"{where} gives document {document} {length} rows, but the plan's lengths say {plan.lengths[document]}"
            )
    if group.pad_to is not None and (type(group.pad_to) is not int or group.pad_to < max(group.lengths)):
        raise PlanError(
            f"{where} pads to {group.pad_to!r} rows, less than its longest document, {max(group.lengths)}"
        )
    check_choice(f"{where}: partition", group.partition, PARTITIONS)
    if group.parents is not None:
        _check_parents(where, group)
    try:
        if "a2a+p2p" in check_comm_types(group.cp_comm_type):
            check_hierarchical_sizes(group.hierarchical_context_parallel_sizes, group.degree)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def _check_parents(where: str, group: Group) -> None:
    """Each document stands behind its parent, with only descendants of the parent between both (as `Group` says)."""
    parents = group.parents or ()
    if len(parents) != len(group.documents) or {type(parent) for parent in parents} != {int}:
        raise PlanError(
            f"{where} has the parents {items_text(parents)} for {len(group.documents)} documents; give each an integer "
            "(int): the index of a document of the group, or -1"
        )
    if group.pad_to is not None:
        raise PlanError(
            f"{where} pads to {group.pad_to} rows and has parents; a prefix tree is packed: leave pad_to out"
        )
    path = list[int]()  # a stack: the document before this one on top, below it its parent, and so on
    for index, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            raise PlanError(
                f"{where} gives document {group.documents[index]}, at index {index}, the parent {parent}; a parent "
                "stands before its branches, and between both only descendants of the parent"
            )
        path.append(index)


def _header_lines(plan: Plan, cost: Cost, times: Timeline) -> list[str]:
    """`times` are those under `cost`."""
    cap = f"at most {plan.max_tokens_per_slot:,}" if plan.max_tokens_per_slot else "no limit on"
    lengths = sorted(plan.lengths)
    median = f", median {lengths[len(lengths) // 2]:,}" if lengths else ""
    spread = f"{lengths[0]:,} to {lengths[-1]:,} rows{median}" if lengths else "none"
    fullest = int(times.rows.max(initial=0))
    bound = plan.lower_bound_seconds
    seconds = times.step_seconds
    ratio = f"{seconds / bound:.3f} x the lower bound of {seconds_text(bound)}" if bound else "no lower bound"
    lines = [
        f"{plan.planner} plan, {plan.mode}: {plural(plan.slots, 'slot')}, "
        f"{plural(len(plan.micro_batches), 'micro-batch', 'es')}, {cap} rows a slot",
        f"  documents   {len(plan.lengths):>14,}   {spread}",
        f"  tokens      {plan.tokens:>14,}   {plan.targets:,} targets",
        f"  predicted   {seconds_text(seconds):>14}   {ratio}",
        f"  priced for  {cost.source or NO_MACHINE}{DEFAULT_COST_NOTE if cost.source == DEFAULT_SOURCE else ''}",
    ]
    if cost.closing_seconds:
        closing = seconds_text(cost.closing_seconds)
        share = cost.closing_seconds / seconds
        lines.append(f"  closing     {closing:>14}   {share:.1%} of it: parameters gathered, gradients summed")
    if plan.parents is not None:
        branches = sum(plan.bases[document] > 0 for document in plan.whole_documents)
        prefixes = len(plan.lengths) - len(plan.whole_documents)
        text = f"rows fewer: {plural(prefixes, 'prefix', 'es')} of {plural(branches, 'document')}"
        lines.append(f"  shared      {plan.spared_rows:>14,}   {text}")
    used = f"of slots x micro-batches x the fullest slot's {fullest:,} rows"
    return [*lines, f"  rows used   {plan.efficiency:>14.1%}   {used}"]


PLAN_NUMBERS = ("slots", "targets", "mode", "max_tokens_per_slot", "node_size", "row_multiple", "planner")
PLAN_SECONDS = ("predicted_seconds", "lower_bound_seconds")


def group_counts(plan: Plan) -> list[dict[str, Any]]:
    """Count the groups of each degree and type of a plan, and their tokens, the widest groups last.

    >>> group_counts(plan)  # doctest: +SKIP
    [{'degree': 1, 'cp_comm_type': '', 'count': 12, 'tokens': 9031}, {'degree': 4, 'cp_comm_type': 'a2a', ...}]

    The type of a group of one slot, which shares nothing, is "".
    """
    counts = Counter[tuple[int, str]]()
    tokens = Counter[tuple[int, str]]()
    for group in plan.groups:
        kind = (
            comm_type_text(group.cp_comm_type, [group.hierarchical_context_parallel_sizes])
            if group.degree > 1
            else ""
        )
        counts[group.degree, kind] += 1
        tokens[group.degree, kind] += group.tokens
    return [
        {"degree": key[0], "cp_comm_type": key[1], "count": counts[key], "tokens": tokens[key]}
        for key in sorted(counts)
    ]


def list_as_tuple(value: Any) -> Any:
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value

"""What makes a plan sound: each document once, slots in range, caps held in whole rows, known names.

A planner's own mistake and a plan that came from a file are told apart by nothing: both raise PlanError that names the
micro-batch, group, slot or document and the numbers. Whether a model can run a plan (heads, layers) is for `attention`.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral

import numpy as np

from longspan.errors import LayoutError, PlanError
from longspan.layout import check_lengths
from longspan.plan.micro_batch import PARTITIONS, Group
from longspan.plan.plan_fields import PlanFields
from longspan.plan.timeline import slot_rows

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")
MODES = ("lockstep", "free")


def check_plan(plan: PlanFields) -> None:
    """Raise PlanError where the plan is not sound."""
    _check_numbers(plan)
    for m, batch in enumerate(plan.micro_batches):
        for g, group in enumerate(batch.groups):
            _check_group(f"micro-batch {m}, group {g}", group, plan)
    _check_documents(plan)
    pads = [group.pad_to or 0 for batch in plan.micro_batches for group in batch.groups]
    check_size(len(plan.lengths), max((*pads, *plan.lengths), default=0))
    _check_cap(plan)


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """The value as an int, if it is an integer of at least `least`; else PlanError naming it."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise PlanError(f"{name} is {value!r}; give an integer of at least {least}")
    return int(value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise PlanError where the value is none of the choices."""
    if value not in choices:
        raise PlanError(f"{name} is {value!r}; use one of {', '.join(choices)}")


def check_size(documents: int, longest: int) -> None:
    """Raise PlanError where sums of squared lengths might not fit 63 bits, in which work is counted."""
    most = (2**63 - 1) // max(1, longest) ** 2
    if documents > most:
        raise PlanError(
            f"{documents} documents of up to {longest} rows cannot be priced in 64-bit integers; plan at most {most} "
            f"of that length at once, or cut them"
        )


def check_comm_types(cp_comm_type: str | Sequence[str]) -> tuple[str, ...]:
    """The types named, one per layer or one for all, if they are known."""
    types = (cp_comm_type,) if isinstance(cp_comm_type, str) else tuple(cp_comm_type)
    if not types:
        raise PlanError("cp_comm_type is an empty list; give one type, or one for each layer")
    for layer, kind in enumerate(types):
        where = "cp_comm_type" if isinstance(cp_comm_type, str) else f"cp_comm_type of layer {layer}"
        check_choice(where, kind, COMM_TYPES)
    return types


def check_hierarchy(types: Iterable[str], sizes: Sequence[int] | None, degree: int) -> None:
    """Raise PlanError where a layer uses a2a+p2p and the two sizes are missing or do not multiply to the degree."""
    if "a2a+p2p" not in types:
        return
    if sizes is None or len(sizes) != 2:
        raise PlanError(
            f"cp_comm_type a2a+p2p needs hierarchical_context_parallel_sizes=(a2a, p2p) with product {degree}; "
            f"got {sizes if sizes is None else tuple(sizes)}"
        )
    inner, outer = (check_count("a size of hierarchical_context_parallel_sizes", size) for size in sizes)
    if inner * outer != degree:
        fit = ", ".join(f"({a}, {degree // a})" for a in range(1, degree + 1) if degree % a == 0)
        raise PlanError(
            f"hierarchical_context_parallel_sizes ({inner}, {outer}) multiply to {inner * outer}, but the group has cp "
            f"{degree}; use one of {fit}"
        )


def heads_allow(degree: int, heads: int | None, types: Iterable[str], tp: int = 1) -> bool:
    """Whether so many query heads (None: not known) can be dealt to a group under `a2a`, where a layer uses it."""
    return heads is None or degree == 1 or "a2a" not in types or heads % (degree * tp) == 0


def _check_numbers(plan: PlanFields) -> None:
    check_count("slots", plan.slots)
    check_count("targets", plan.targets, least=0)
    check_count("node_size", plan.node_size)
    check_count("row_multiple", plan.row_multiple)
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


def _check_group(where: str, group: Group, plan: PlanFields) -> None:
    if not group.slots or not group.documents:
        missing = "slots" if group.documents else "documents"
        raise PlanError(f"{where} has no {missing}; leave the group out: a slot in no group runs a dummy pass")
    for name in ("slots", "documents", "lengths"):
        if set(map(type, getattr(group, name))) != {int}:
            raise PlanError(f"{where}: {name} {_short(getattr(group, name))} must be integers (int, not numpy's)")
    if len(set(group.slots)) != len(group.slots):
        raise PlanError(f"{where} names a slot twice: slots {_short(group.slots)}")
    if min(group.slots) < 0 or max(group.slots) >= plan.slots:
        raise PlanError(f"{where} has slots {_short(group.slots)}, but the plan has slots 0 to {plan.slots - 1}")
    _check_group_lengths(where, group, plan)
    check_choice(f"{where}: partition", group.partition, PARTITIONS)
    try:
        types = check_comm_types(group.cp_comm_type)
        check_hierarchy(types, group.hierarchical_context_parallel_sizes, group.degree)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def _check_group_lengths(where: str, group: Group, plan: PlanFields) -> None:
    if len(group.documents) != len(group.lengths):
        raise PlanError(f"{where} has {len(group.documents)} documents and {len(group.lengths)} lengths")
    if min(group.documents) < 0 or max(group.documents) >= len(plan.lengths):
        known = f"documents 0 to {len(plan.lengths) - 1}" if plan.lengths else "no documents"
        raise PlanError(f"{where} has documents {_short(group.documents)}, but the plan has {known}")
    for document, length in zip(group.documents, group.lengths, strict=True):
        if plan.lengths[document] != length:
            raise PlanError(
                f"{where} gives document {document} {length} rows, but the plan's lengths say {plan.lengths[document]}"
            )
    if group.pad_to is not None and (type(group.pad_to) is not int or group.pad_to < max(group.lengths)):
        raise PlanError(f"{where} pads to {group.pad_to!r} rows, less than its longest document, {max(group.lengths)}")


def _check_documents(plan: PlanFields) -> None:
    documents = np.array([d for batch in plan.micro_batches for d in batch.documents], dtype=np.int64)
    times = np.bincount(documents, minlength=len(plan.lengths))
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        d = int(wrong[0])
        places = [m for m, batch in enumerate(plan.micro_batches) if d in batch.documents]
        seen = f"{times[d]} times (micro-batches {_short(places)})" if places else "in no micro-batch"
        raise PlanError(
            f"document {d} ({plan.lengths[d]} rows) is {seen}, and must be in exactly one group; "
            f"{len(wrong)} of {len(plan.lengths)} documents are wrong"
        )


def _check_cap(plan: PlanFields) -> None:
    cap = plan.max_tokens_per_slot
    if cap is None:
        return
    rows = slot_rows(plan.micro_batches, plan.slots, plan.row_multiple)
    over = np.argwhere(rows > cap)
    if len(over):
        m, slot = (int(i) for i in over[0])
        groups = [g for g, _ in plan.micro_batches[m].groups_of(slot)]
        rounded = f" in multiples of {plan.row_multiple}" if plan.row_multiple > 1 else ""
        raise PlanError(
            f"slot {slot} holds {rows[m, slot]} rows{rounded} in micro-batch {m} (groups {_short(groups)}), above "
            f"max_tokens_per_slot {cap}; {len(over)} of {rows.size} places are above it"
        )


def _short(values: Sequence[object], limit: int = 8) -> str:
    head = ", ".join(str(value) for value in values[:limit])
    return f"({head}, … {len(values)} in all)" if len(values) > limit else f"({head})"

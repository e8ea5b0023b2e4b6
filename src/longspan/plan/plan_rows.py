"""Plans in few bytes: one JSON object a step, as a run keeps them in plans.jsonl, and back; and the groups of a plan.

A row has step, the numbers of the plan (slots, targets, mode and so on), `lengths`, `kinds` and `micro_batches`. A kind
is [communication type, sizes of its levels, partition, pad_to]. A micro-batch is a list of groups, and a group is
[kind, first slot, degree, documents ...] if its slots are neighbours in order, else [kind, [slots ...], documents ...].
`cost` stands in a row if it differs from that of the row before.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from longspan.errors import PlanError
from longspan.files import parse_json, read_lines
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.plan import Plan
from longspan.plan.ways import type_text

_NUMBERS = ("slots", "targets", "mode", "max_tokens_per_slot", "node_size", "row_multiple", "planner")
_SECONDS = ("predicted_seconds", "lower_bound_seconds")
MOST_BYTES = 64 << 20  # of a line
_MOST_SLOTS, _MOST_PLACES = 1 << 20, 1 << 24  # of a plan, and of its groups in all: a short line can name huge ranges


def plan_row(step: int, plan: Plan, *, after: Cost | None = None) -> str:
    """Write the plan of a step as a line of JSON, without its cost if that equals `after`, the cost of the line before.

    >>> plan_row(7, Plan.from_json(text))  # doctest: +SKIP
    '{"step":7,"slots":8,...,"lengths":[900,300,20],"kinds":[["p2p",null,"zigzag",null]],"micro_batches":[[[0,0,4,0]]]}'
    """
    kinds = dict[tuple[Any, ...], int]()
    batches = [[_group_row(group, kinds) for group in batch.groups] for batch in plan.micro_batches]
    row = {"step": step} | {name: getattr(plan, name) for name in (*_NUMBERS, *_SECONDS)}
    row |= {} if plan.cost == after else {"cost": plan.cost.to_json()}
    row |= {"lengths": plan.lengths, "kinds": list(kinds), "micro_batches": batches}
    return json.dumps(row, separators=(",", ":"))


def read_plans(path: str | Path) -> Iterator[tuple[int, Plan]]:
    """Yield the steps and checked plans of a run's plans.jsonl, in order; its last line may be torn.

    >>> plans = dict(read_plans("runs/first/plans.jsonl"))  # doctest: +SKIP

    Raises PlanError, with the number of the line, for a line that holds no plan. A plan that was priced by a subclass
    of Cost gets a plain Cost of the same constants, and keeps its predicted seconds.
    """
    cost = DEFAULT_COST
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            step, plan = read_plan_row(line, cost, f"{path}, line {number}")
            cost = plan.cost
            yield step, plan


def read_plan_row(line: str | bytes, cost: Cost = DEFAULT_COST, where: str = "the line") -> tuple[int, Plan]:
    """Return the step and the checked plan of a line of plans.jsonl; `cost` is that of the row before.

    Raises PlanError, which begins with `where`, for a line that holds no plan.
    """
    try:
        row = parse_json(line)
        cost = Cost.from_json(row["cost"]) if "cost" in row else cost
        return int(row["step"]), replace(_read_plan(row), cost=cost).check()
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        raise PlanError(f"{where} holds no plan: {type(error).__name__}: {error}") from error


def find_plan(path: str | Path, step: int) -> Plan | None:
    """Return the plan of one step in a run's plans.jsonl, the last if the step was run again; None without one.

    Only the step's line and the one with its cost are parsed. Raises PlanError for a line that holds no plan.

    >>> find_plan("runs/first/plans.jsonl", 100)  # doctest: +SKIP
    """
    start, step_line, cost_line, cost_line_of_step = b'{"step":%d,' % step, b"", b"", b""
    for line in read_lines(Path(path), MOST_BYTES):
        if line is None or not line.endswith(b"\n"):  # longer than any plan, or the torn last line
            continue
        if has_cost(line):
            cost_line = line
        if line.startswith(start):
            step_line, cost_line_of_step = line, cost_line
    if not step_line:
        return None
    where = f"{path}, step {step}"
    cost = read_plan_row(cost_line_of_step, where=where)[1].cost if cost_line_of_step else DEFAULT_COST
    return read_plan_row(step_line, cost, where)[1]


def has_cost(line: bytes) -> bool:
    """Return whether a line of plans.jsonl has a cost, which is also that of the lines after it until the next cost."""
    return b'"cost":{' in line


def group_counts(plan: Plan) -> list[dict[str, Any]]:
    """Count the groups of each degree and type of a plan, and their tokens, the widest groups last.

    >>> group_counts(plan)  # doctest: +SKIP
    [{'degree': 1, 'cp_comm_type': '', 'count': 12, 'tokens': 9031}, {'degree': 4, 'cp_comm_type': 'a2a', ...}]

    The type of a group of one slot, which shares nothing, is "".
    """
    counts = dict[tuple[int, str], tuple[int, int]]()
    for group in (group for batch in plan.micro_batches for group in batch.groups):
        kind = type_text(group.cp_comm_type, [group.hierarchical_context_parallel_sizes]) if group.degree > 1 else ""
        key = group.degree, kind
        count, tokens = counts.get(key, (0, 0))
        counts[key] = count + 1, tokens + group.tokens
    return [
        {"degree": degree, "cp_comm_type": kind, "count": count, "tokens": tokens}
        for (degree, kind), (count, tokens) in sorted(counts.items())
    ]


def _group_row(group: Group, kinds: dict[tuple[Any, ...], int]) -> list[Any]:
    """A kind that `kinds` lacks is added to it, with the next number."""
    kind = group.cp_comm_type, group.hierarchical_context_parallel_sizes, group.partition, group.pad_to
    slots, number = group.slots, kinds.setdefault(kind, len(kinds))
    if slots == tuple(range(slots[0], slots[0] + len(slots))):
        return [number, slots[0], len(slots), *group.documents]
    return [number, slots, *group.documents]


def _read_plan(row: Mapping[str, Any]) -> Plan:
    """Read the plan in a line of plans.jsonl, unchecked, with the default cost."""
    lengths: tuple[int, ...] = tuple(row["lengths"])
    kinds: list[list[Any]] = [[_list_as_tuple(x) for x in kind] for kind in row["kinds"]]
    degrees = (group[2] for batch in row["micro_batches"] for group in batch if not isinstance(group[1], list))
    if row["slots"] > _MOST_SLOTS or sum(degrees) > _MOST_PLACES:
        raise ValueError(f"it has more than {_MOST_SLOTS:,} slots, or groups of more than {_MOST_PLACES:,} in all")
    batches = (MicroBatch(tuple(_read_groups(batch, kinds, lengths))) for batch in row["micro_batches"])
    values: dict[str, Any] = {name: row[name] for name in (*_NUMBERS, *_SECONDS)}
    return Plan(lengths=lengths, micro_batches=tuple(batches), **values)


def _list_as_tuple(value: Any) -> Any:
    return tuple(cast(list[Any], value)) if isinstance(value, list) else value


def _read_groups(rows: Iterable[list[Any]], kinds: list[list[Any]], lengths: tuple[int, ...]) -> Iterator[Group]:
    """A row is the number of its kind, its slots as a list, or the first slot and their number, and its documents."""
    for number, first, *numbers in rows:
        is_list = isinstance(first, list)
        slots: tuple[int, ...] = _list_as_tuple(first) if is_list else tuple(range(first, first + numbers[0]))
        documents: tuple[int, ...] = tuple(numbers if is_list else numbers[1:])
        kind, sizes, partition, pad_to = kinds[number]
        yield Group(slots, documents, tuple(lengths[d] for d in documents), kind, sizes, partition, pad_to)

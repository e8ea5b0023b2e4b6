"""Plans of a run's steps in a file: a line of JSON a step, written, read and found (plans.jsonl)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan.errors import PlanError
from longspan.files import parse_json, read_lines
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.plan import PLAN_NUMBERS, PLAN_SECONDS, Plan, list_as_tuple

# A line has at most so many bytes.
MOST_BYTES = 64 << 20
# A short line can name huge ranges, so that a plan has at most so many slots, and so many places of groups in all.
_MOST_SLOTS = 1 << 20
_MOST_PLACES = 1 << 24


def plan_row(step: int, plan: Plan, *, after: Cost | None = None) -> str:
    """Write the plan of a step as a line of JSON, without its cost if that equals `after`, the cost of the line before.

    >>> plan_row(7, Plan.from_json(text))  # doctest: +SKIP
    '{"step":7,"slots":8,...,"lengths":[900,300,20],"kinds":[["p2p",null,"zigzag",null]],"micro_batches":[[[0,0,4,0]]]}'
    """
    # This numbers, from 0, what groups have besides slots and documents.
    kinds = dict[tuple[Any, ...], int]()
    batches = list[list[list[Any]]]()
    for batch in plan.micro_batches:
        groups = list[list[Any]]()
        for group in batch.groups:
            kind = group.cp_comm_type, group.hierarchical_context_parallel_sizes, group.partition, group.pad_to
            if group.parents is not None:
                kind = (*kind, group.parents)
            number = kinds.setdefault(kind, len(kinds))
            slots = group.slots
            written_slots: list[Any] = [slots]
            if slots == tuple(range(slots[0], slots[0] + len(slots))):  # neighbours: the first slot, and how many
                written_slots = [slots[0], len(slots)]
            groups.append([number, *written_slots, *group.documents])
        batches.append(groups)
    row = {"step": step} | {name: getattr(plan, name) for name in (*PLAN_NUMBERS, *PLAN_SECONDS)}
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
    """Return the step and the checked plan of a line of plans.jsonl, as `plan_row` writes it; `cost` is that of the row
    before, which counts if the line has none. Raises PlanError, which begins with `where`, for a line that holds no
    plan.
    """
    try:
        row = parse_json(line)
        cost = Cost.from_json(row["cost"]) if "cost" in row else cost
        lengths: tuple[int, ...] = tuple(row["lengths"])
        kinds: list[list[Any]] = [[list_as_tuple(x) for x in kind] for kind in row["kinds"]]
        # A group is [kind, first slot, number of slots, *documents], or [kind, [slots], *documents].
        degrees = (group[2] for batch in row["micro_batches"] for group in batch if not isinstance(group[1], list))
        if row["slots"] > _MOST_SLOTS or sum(degrees) > _MOST_PLACES:
            raise ValueError(
                f"it has more than {_MOST_SLOTS:,} slots, or groups of more than {_MOST_PLACES:,} in all"
            )
        batches = list[MicroBatch]()
        for batch in row["micro_batches"]:
            groups = list[Group]()
            for kind, first_or_slots, *numbers in batch:
                if isinstance(first_or_slots, list):
                    slots: tuple[int, ...] = list_as_tuple(first_or_slots)
                    documents: tuple[int, ...] = tuple(numbers)
                else:
                    slots = tuple(range(first_or_slots, first_or_slots + numbers[0]))
                    documents = tuple(numbers[1:])
                groups.append(Group(slots, documents, tuple(lengths[d] for d in documents), *kinds[kind]))
            batches.append(MicroBatch(tuple(groups)))
        values: dict[str, Any] = {name: row[name] for name in (*PLAN_NUMBERS, *PLAN_SECONDS)}
        plan = Plan(lengths=lengths, micro_batches=tuple(batches), cost=cost, **values)
        return int(row["step"]), plan.check()
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        raise PlanError(f"{where} holds no plan: {type(error).__name__}: {error}") from error


def find_plan(path: str | Path, step: int) -> Plan | None:
    """Return the plan of one step in a run's plans.jsonl, the last one if the step was run again; None if there is
    none. Only two lines are parsed: that of the step, and the last one up to it that has a cost. Raises PlanError if
    one of these holds no plan.
    """
    start = b'{"step":%d,' % step
    step_and_cost_lines = None
    last_cost_line = b""
    for line in read_lines(Path(path), MOST_BYTES):
        if line is None or not line.endswith(b"\n"):  # longer than any plan, or the torn last line
            continue
        if b'"cost":{' in line:
            last_cost_line = line
        if line.startswith(start):
            step_and_cost_lines = line, last_cost_line
    if step_and_cost_lines is None:
        return None
    step_line, cost_line = step_and_cost_lines
    where = f"{path}, step {step}"
    cost = read_plan_row(cost_line, where=where)[1].cost if cost_line else DEFAULT_COST
    return read_plan_row(step_line, cost, where)[1]

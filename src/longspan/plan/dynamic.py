"""Plans in which every micro-batch has the groups that suit its documents."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.check import check_count
from longspan.plan.cost import DEFAULT_COST, Cost
from longspan.plan.plan import MicroBatch, Mode, Plan
from longspan.plan.request import Request

Effort = Literal["fast", "balanced", "thorough"]


def plan_dynamic(
    lengths: Sequence[int],
    home: Layout,
    *,
    max_tokens_per_slot: int | None,
    min_cp: int = 1,
    max_cp: int | None = None,
    cost: Cost = DEFAULT_COST,
    node_size: int = 8,
    micro_batch_multiple: int = 1,
    mode: Mode = "lockstep",
    targets: int | None = None,
    cp_comm_type: str | Sequence[str] = "p2p",
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    row_multiple: int = 1,
    allow_empty: bool = False,
    warm: object = None,
    effort: Effort = "balanced",
) -> Plan:
    """Choose groups for documents micro-batch by micro-batch, so that the step ends early."""
    request = Request.of(
        lengths,
        home,
        targets=targets,
        max_tokens_per_slot=max_tokens_per_slot,
        cp_comm_type=cp_comm_type,
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
        allow_empty=allow_empty,
        cost=cost,
        node_size=node_size,
        micro_batch_multiple=micro_batch_multiple,
        mode=mode,
        row_multiple=row_multiple,
    )
    slots = request.slots
    check_count("min_cp", min_cp)
    widest = slots if max_cp is None else min(check_count("max_cp", max_cp), slots)
    if min_cp > widest:
        raise PlanError(f"min_cp {min_cp} is above max_cp {max_cp} or the {slots} slots; use at most {widest}")
    request.check_longest(widest)
    if not request.lengths:
        return request.plan((), "dynamic", max_cp=max_cp)
    size = max(min_cp, min(node_size, widest))
    starts = list(range(0, slots - size + 1, size))
    order = np.argsort(-np.array(request.lengths), kind="stable").tolist()
    cap = sum(request.lengths) if request.rows is None else request.rows
    batches: list[dict[int, list[int]]] = []
    wide: list[tuple[int, int]] = []
    for d in order:
        need = math.ceil(request.lengths[d] / cap)
        if need > size:
            wide.append((d, need))
            continue
        load = [
            (sum(request.lengths[e] for e in held.get(s, [])), m, s) for m, held in enumerate(batches) for s in starts
        ]
        fits = [x for x in load if x[0] + request.lengths[d] <= cap * size]
        if not fits:
            batches.append({})
            fits = [(0, len(batches) - 1, starts[0])]
        _, m, s = min(fits)
        batches[m].setdefault(s, []).append(d)
    result = [MicroBatch((request.group(range(need), [d]),)) for d, need in wide]
    for held in batches:
        result.append(
            MicroBatch(tuple(request.group(range(s, s + size), sorted(ds)) for s, ds in sorted(held.items())))
        )
    return request.plan(result, "dynamic", max_cp=max_cp)

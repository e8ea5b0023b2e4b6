"""`plan_dynamic`: check the arguments, make plans in more than one way, and return the fastest.

`lockstep.py` fills gaps with short documents and needs some to be good. With few documents, every way to group those of
a micro-batch by work is tried below, and for each the widths that let the slowest group end earliest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal, Unpack, get_args

import numpy as np
import numpy.typing as npt

from longspan.layout import Floats, Integers, Layout
from longspan.plan.check import check_choice
from longspan.plan.dynamic.free import plan_free
from longspan.plan.dynamic.lockstep import lockstep_seconds, make_micro_batch, plan_lockstep
from longspan.plan.dynamic.problem import MORE_MICRO_BATCHES, FreeSlots, Problem, slots_in_parts
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.plan import Plan
from longspan.plan.planners.fixed import Packer, pack_least_loaded
from longspan.plan.planners.options import PlanKeywords, PlanOptions, expand_option_signature
from longspan.plan.planners.request import Request
from longspan.plan.step_times import lower_bound_seconds

EffortName = Literal["fast", "balanced", "thorough"]

# A plan so near the lower bound is not compared with other kinds of plans.
CLOSE = 1.02
# Up to so many slots fixed degrees are tried; above, from DISTANT on.
COMPARED_SLOTS = 1024
COMPARED_DOCUMENTS = 20_000
DISTANT = 1.05
# Up to so many slots plans of degrees that are powers of two are searched too, on measured links.
HALVED_SLOTS = 64


@expand_option_signature
def plan_dynamic(
    lengths: Sequence[int],
    home: Layout,
    *,
    min_cp: int = 1,
    max_cp: int | None = None,
    effort: EffortName = "balanced",
    options: PlanOptions | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Plan:
    """Choose groups for documents micro-batch by micro-batch, so that the step ends as early as possible.

    >>> from longspan.layout import Layout
    >>> plan = plan_dynamic([5000, 600, 500, 400], Layout(ranks=8), max_tokens_per_slot=1024)
    >>> plan.predicted_seconds / plan.lower_bound_seconds < 1.5
    True

    Groups have any degree from `min_cp` to `max_cp` (None: all slots), and stay inside a node of `node_size` slots if
    they can; a slot may be in several groups of a micro-batch. `max_tokens_per_slot` limits the rows of a slot in a
    micro-batch, in whole multiples of `row_multiple`. `mode` is who waits: all slots for the slowest of each
    micro-batch ("lockstep"), or only those that share a group ("free"). `partition` is that of `plan_fixed`.
    `hierarchical_context_parallel_sizes` of `a2a+p2p` is one number (of a pair the first), the slots that exchange
    heads: in a group of any degree as many as the greatest common divisor of that number and the degree; None: the
    sizes that are fastest for each group. With `heads`, the model's query heads, which the home's tp divides, groups
    have only degrees that `cp_comm_type` allows; without it a degree that the heads do not allow is an error of
    `attend`. `effort` is how long to search. All other keyword arguments are fields of `PlanOptions`, which `options`
    takes as one value.

    The plan is a function of the arguments only, so it is the same on every rank. It is not slower than `plan_fixed` at
    any degree in the range, except that above 1024 slots or 20,000 documents these are only tried if the plan is more
    than 5 % above its bound. No documents give a step of dummy micro-batches; with `allow_empty=False`, an error.
    Raises PlanError if a document fits no group, or the degrees, sizes or heads are impossible; LayoutError for a bad
    length.
    """
    request = Request.from_arguments(lengths, home, options, keywords)
    degrees = request.check_degrees(min_cp, max_cp)
    check_choice("effort", effort, get_args(EffortName))
    if not request.lengths:
        return request.make_plan((), "dynamic", max_cp=max_cp)
    problem = Problem(request, degrees)
    goal = lower_bound_seconds(
        request.lengths,
        request.slots,
        request.max_tokens_per_slot,
        request.cost,
        request.mode,
        max_cp=problem.max_cp,
        node_size=request.node_size,
        bases=request.bases,
    ).seconds
    # The fastest of several ways to plan: one is left out if those before it come close to the goal.
    plans = list[tuple[float, list[MicroBatch]]]()  # micro-batches, after the predicted seconds of their step

    def add_plan(micro_batches: list[MicroBatch]) -> None:
        plans.append((request.step_seconds(micro_batches), micro_batches))

    if request.mode == "free":
        add_plan(plan_free(problem))
    if not plans or plans[0][0] > CLOSE * goal:
        add_plan(plan_lockstep(problem, _count_search_steps(effort, problem)))
        if min(plans, key=itemgetter(0))[0] > CLOSE * goal:
            if few := plan_few_items(problem):
                add_plan(few)
            # Without powers of two as degrees a step on links of 25 GB/s takes up to 10 % longer.
            if powers := _problem_of_powers_of_two(problem):
                add_plan(plan_lockstep(powers, _count_search_steps(effort, powers)))
    best = min(plans, key=itemgetter(0))[0]
    # Plans of one degree are compared where that is cheap, or where all others stay far from the goal.
    if (request.slots <= COMPARED_SLOTS and len(request.lengths) <= COMPARED_DOCUMENTS) or best > DISTANT * goal:
        for micro_batches in _fixed_plans(problem, best):
            add_plan(micro_batches)
    return request.make_plan(min(plans, key=itemgetter(0))[1], "dynamic", max_cp=problem.max_cp)


def _count_search_steps(effort: EffortName, problem: Problem) -> int:
    """The more items, the fewer, as each change takes longer. A step of many slots with few documents each takes up
    to 7 % longer after 12 changes than after 40 (bench/plans/planner.py --tokens-per-slot 8192)."""
    scale = {"fast": 1, "balanced": 4, "thorough": 16}[effort]
    size = len(problem.tokens) + problem.request.slots
    most = (65_000 // size) ** 2  # so that 8,192 slots take less than 5 s
    return scale * max(min(3, most), min(40, 4000 // size), min(10, 32 * problem.request.slots // size, most))


def _problem_of_powers_of_two(problem: Problem) -> Problem | None:
    """None where that is not worth a search. On measured links groups of other degrees have slower types, or leave
    slots of a host over. Ideal links show no difference, many slots take long, and where all or none of the
    degrees are powers of two nothing is left to plan."""
    request = problem.request
    degrees = tuple(degree for degree in problem.degrees if degree & (degree - 1) == 0)
    if request.cost.network is None or request.slots > HALVED_SLOTS or len(degrees) in (0, len(problem.degrees)):
        return None
    if problem.tokens[0] <= degrees[-1] * problem.cap:
        return Problem(request, degrees)
    return None


def _fixed_plans(problem: Problem, best: float) -> Iterator[list[MicroBatch]]:
    """No plan of a degree takes less than the mean work of a slot and the launches and waits of the fewest
    micro-batches. Documents of a group are sorted as in the other plans."""
    request = problem.request
    for cp in problem.degrees:
        launch = request.cost.micro_batch_seconds + float(request.cost.latency_seconds(cp))
        least = (problem.mean_slot_seconds + problem.least_micro_batches * launch) / request.cost.stages
        if (
            request.slots % cp
            or problem.tokens[0] > cp * problem.cap
            or least + request.cost.update_seconds >= best
        ):
            continue
        packer = Packer(request, cp)
        yield [_sort_documents(batch) for batch in packer.micro_batches()]


def _sort_documents(batch: MicroBatch) -> MicroBatch:
    """Longest first, of equal length by id; trees keep their order, parents first."""
    groups: list[Group] = []
    for group in batch.groups:
        if group.parents is not None:
            groups.append(group)
            continue
        order = sorted(range(len(group.documents)), key=lambda i: (-group.lengths[i], group.documents[i]))
        documents, lengths = (tuple(values[i] for i in order) for values in (group.documents, group.lengths))
        groups.append(replace(group, documents=documents, lengths=lengths))
    return MicroBatch(tuple(groups))


# ---- few items

# A step of more items has too many ways to group them.
MOST_ITEMS = 40
MOST_SLOTS = 64
# A micro-batch has at most so many groups.
MOST_GROUPS = 24
MOST_MOVES = 60  # tried in a micro-batch


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Groups of items that work at the same time: the slots of each, and when the slowest ends, without the launch."""

    # Each group has a list; the widest group is first.
    items: list[list[int]]
    slots: list[tuple[int, ...]]
    slowest: int  # group
    seconds: float


def plan_few_items(problem: Problem) -> list[MicroBatch] | None:
    """Search for the best plan of few items. None for too many items or slots, and if the search finds no plan in which
    all micro-batches fit.
    """
    if len(problem.tokens) > MOST_ITEMS or problem.request.slots > MOST_SLOTS:
        return None
    prices = GroupPrices(problem)
    best: tuple[float, list[Arrangement]] | None = None
    for batches in _divisions_into_batches(problem):
        results = (_best_arrangement(prices, items) for items in batches)
        arrangements = [arrangement for arrangement in results if arrangement is not None]
        seconds = lockstep_seconds(problem, [arrangement.seconds for arrangement in arrangements])
        if len(arrangements) == len(batches) and (best is None or seconds < best[0]):
            best = seconds, arrangements
    if best is None:
        return None
    return [make_micro_batch(problem, dict(zip(a.slots, a.items, strict=True))) for a in best[1]]


def _divisions_into_batches(problem: Problem) -> Iterator[list[list[int]]]:
    """For each number of micro-batches items are divided in two ways: into equal work, and, longest first, into
    parts of equal tokens, so that the longest are together; an item is in the part that holds its middle token."""
    tokens = problem.tokens.tolist()
    middle = np.cumsum(problem.tokens) - problem.tokens // 2
    for count in range(problem.least_micro_batches, problem.least_micro_batches + MORE_MICRO_BATCHES + 1):
        even = pack_least_loaded(tokens, problem.work.tolist(), count, problem.request.slots * problem.cap)
        by_length = np.minimum(middle * count // sum(tokens), count - 1).tolist()
        # For one micro-batch both divisions are the same.
        for places in (even, by_length if count > 1 else None):
            if places is not None:
                yield [items for items in _items_by_place(range(len(places)), places, count) if items]


def _items_by_place(items: range | list[int], places: list[int], count: int) -> list[list[int]]:
    return [[item for item, other in zip(items, places, strict=True) if other == place] for place in range(count)]


class GroupPrices:
    """The seconds of groups of a problem's items at each degree. A group is priced when it is first asked for: most
    trials of a search differ in two groups.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.degrees: Integers = np.array(problem.degrees, dtype=np.int64)
        self.inside: npt.NDArray[np.bool_] = self.degrees <= problem.widest_in_node
        self._seconds: dict[tuple[int, ...], Floats] = {}

    def seconds_at_degrees(self, groups: list[list[int]]) -> Floats:
        """Return the seconds of groups of these items (groups, degrees), inside a node if one holds the degree; inf
        where the rows of a slot are above the cap.
        """
        keys = [tuple(items) for items in groups]
        unpriced = [key for key in keys if key not in self._seconds]
        if unpriced:
            tokens, squares, documents = self.group_sizes(unpriced)[:, :, None]
            cost = self.problem.request.cost
            seconds = cost.group_seconds(tokens, squares, self.degrees, self.inside, documents)
            seconds = np.where(-(-tokens // self.degrees) <= self.problem.cap, seconds, np.inf)
            self._seconds |= zip(unpriced, seconds, strict=True)
        return np.array([self._seconds[key] for key in keys])

    def group_sizes(self, groups: Sequence[Sequence[int]]) -> Integers:
        """Return tokens, squared lengths and documents of groups of these items (3, groups)."""
        problem = self.problem
        columns = (problem.tokens, problem.squares, problem.document_counts)
        return np.array(
            [[int(column[list(items)].sum()) for items in groups] for column in columns], dtype=np.int64
        )


def _best_arrangement(prices: GroupPrices, items: list[int]) -> Arrangement | None:
    """None if the items fit no slots."""
    problem = prices.problem
    tokens = problem.tokens[items].tolist()
    work = problem.work[items].tolist()
    best: Arrangement | None = None
    for count in range(1, min(len(items), problem.request.slots // problem.min_cp, MOST_GROUPS) + 1):
        places = pack_least_loaded(tokens, work, count, problem.max_cp * problem.cap)
        arrangement = None if places is None else _arrange_groups(prices, _items_by_place(items, places, count))
        if arrangement is not None and (best is None or arrangement.seconds < best.seconds):
            best = arrangement
    if best is None:
        return None
    # Items move out of the slowest group, one at a time, as long as that helps.
    moves = _groups_after_moves(best)
    for _ in range(MOST_MOVES):
        if (groups := next(moves, None)) is None:
            break
        trial = _arrange_groups(prices, groups)
        if trial is not None and trial.seconds < best.seconds:
            best = trial
            moves = _groups_after_moves(best)
    return best


def _groups_after_moves(arrangement: Arrangement) -> Iterator[list[list[int]]]:
    """One item of the slowest group, its shortest first, goes to each of the others."""
    groups = list(arrangement.items)
    slowest = groups.pop(arrangement.slowest)
    for item in slowest[::-1]:
        remaining = [other for other in slowest if other != item]
        for receiver in range(len(groups)):
            changed = [[*group, item] if place == receiver else group for place, group in enumerate(groups)]
            if remaining:
                changed.append(remaining)
            yield changed


def _arrange_groups(prices: GroupPrices, groups: list[list[int]]) -> Arrangement | None:
    """The widest group is first. Slots let the slowest end earliest, inside blocks if they fit; None: too few slots."""
    problem = prices.problem
    seconds_by_degree = prices.seconds_at_degrees(groups)
    # Of each group the index of the fewest slots with which the slowest ends earliest. The slowest ends at one of these
    # times, which are searched by halving: with more time groups never need more slots.
    ends = np.unique(seconds_by_degree[np.isfinite(seconds_by_degree)])
    low = 0
    high = len(ends)
    chosen = None
    while low < high:
        middle = (low + high) // 2
        in_time = seconds_by_degree <= ends[middle]
        fewest = in_time.argmax(axis=1)
        if in_time.any(axis=1).all() and int(prices.degrees[fewest].sum()) <= problem.request.slots:
            chosen = fewest
            high = middle
        else:
            low = middle + 1
    if chosen is None:
        return None
    widths = prices.degrees[chosen]
    order = np.argsort(-widths, kind="stable")
    free = FreeSlots(problem.blocks, problem.degrees)
    slots = list[tuple[int, ...]]()
    inside_node = list[bool]()
    for width in widths[order].tolist():
        parts = free.take_slots(width)
        slots.append(slots_in_parts(parts))
        inside_node.append(len(parts) == 1 and problem.shares_node(*parts[0]))
    seconds = seconds_by_degree[order, chosen[order]]
    order_of_groups: list[int] = order.tolist()
    items = [groups[g] for g in order_of_groups]
    # Some group got slots of several nodes.
    if inside_node != prices.inside[chosen[order]].tolist():
        tokens, squares, documents = prices.group_sizes(items)
        seconds = problem.request.cost.group_seconds(tokens, squares, widths[order], inside_node, documents)
    slowest = int(seconds.argmax())
    return Arrangement(items, slots, slowest, float(seconds[slowest]))

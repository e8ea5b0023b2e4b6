"""`plan_dynamic`: check the arguments, make plans in more than one way, and return the fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Literal, Unpack

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.check import check_choice, check_count
from longspan.plan.dynamic.few_documents import plan_few_items
from longspan.plan.dynamic.free import plan_free
from longspan.plan.dynamic.lockstep import plan_lockstep
from longspan.plan.dynamic.problem import DegreeSet, Problem
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.plan import Plan
from longspan.plan.planners.fixed import Packer
from longspan.plan.planners.options import PlanKeywords, PlanOptions, call_options, shows_options
from longspan.plan.planners.request import Request, check_first_size, check_heads

EffortName = Literal["fast", "balanced", "thorough"]
Priced = tuple[float, list[MicroBatch]]  # predicted seconds of a step of these micro-batches

CLOSE = 1.02  # of the lower bound: a plan so good is not compared with other kinds of plans
COMPARED_SLOTS, COMPARED_DOCUMENTS = 1024, 20000  # up to which fixed degrees are tried; above, from DISTANT on
DISTANT = 1.05
HALVED_SLOTS = 64  # up to which plans of degrees that are powers of two are searched too, on measured links


@shows_options
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

    Groups have any degree from `min_cp` to `max_cp` (None: all slots), and stay inside a node of `node_size` slots
    if they can (the last node may have fewer); a slot may be in several groups of a micro-batch. `max_tokens_per_slot`
    limits the rows of a slot in a micro-batch, in whole multiples of `row_multiple`. `mode` is who waits: all slots for
    the slowest of each micro-batch ("lockstep"), or only those that share a group ("free"). `partition` is that of
    `plan_fixed`: "contiguous" saves copies under `a2a`, and takes longer than predicted under the other types.

    `hierarchical_context_parallel_sizes` of `a2a+p2p` is one number, the slots that exchange heads (of a pair only the
    first counts): in a group of any degree as many as the greatest common divisor of that number and the degree. None:
    the sizes that are fastest for each group.

    `heads` is the model's number of query heads, which the home's tp divides. With it, groups have only degrees that
    `cp_comm_type` allows: under `a2a` those that divide the query heads of a rank. Without it, any degree is possible,
    and one that the heads do not allow is an error of `attend` in the step.

    `effort` is how long to search. The plan is a function of the arguments only, so it is the same on every rank. It is
    not slower than `plan_fixed` at any degree in the range, except that above 1024 slots or 20,000 documents these are
    only tried if the plan is more than 5 % above its bound.

    All other keyword arguments are fields of `PlanOptions`, which `options` takes as one value.

    No documents give a step of dummy micro-batches; with `allow_empty=False`, an error.

    Raises PlanError if a document fits no group, or the degrees, sizes or heads are impossible; LayoutError for a
    bad length.
    """
    request = Request.of(lengths, home, call_options(plan_dynamic, options, keywords))
    degrees = _possible_degrees(request, min_cp, max_cp)
    check_choice("effort", effort, ("fast", "balanced", "thorough"))
    if not request.lengths:
        return request.plan((), "dynamic", max_cp=max_cp)
    problem = Problem.of(request, degrees)
    goal = request.lower_bound(problem.max_cp).seconds
    return request.plan(_find_fastest_plan(problem, goal, effort), "dynamic", max_cp=problem.max_cp)


def _possible_degrees(request: Request, min_cp: int, max_cp: int | None) -> DegreeSet:
    """Return the degrees that a group may have. Raises PlanError if none is possible or none holds some document."""
    slots = request.slots
    check_count("min_cp", min_cp)
    widest = slots if max_cp is None else min(check_count("max_cp", max_cp), slots)
    if min_cp > slots:
        raise PlanError(f"min_cp {min_cp} is above the {slots} slots; use at most {slots}")
    if max_cp is not None and min_cp > max_cp:
        raise PlanError(f"min_cp {min_cp} is above max_cp {max_cp}; lower min_cp or raise max_cp")
    check_first_size(request)
    degrees = request.degrees(least=int(min_cp), most=widest)
    if not degrees:  # a2a allows no degree of the range: this raises the error that says why
        check_heads(request, widest)
    wider = "use a home of more slots" if widest == slots else "raise max_cp"
    limited = f"use a cp_comm_type other than a2a, which the heads limit to cp {degrees[-1]}"
    request.check_longest(degrees[-1], limited if degrees[-1] < widest else wider)
    return degrees


def _find_fastest_plan(problem: Problem, goal: float, effort: EffortName) -> list[MicroBatch]:
    """Plan in several ways and return the fastest; a way is left out if those before it come close to the goal.

    In order: in free mode a search without lockstep; the search in lockstep; the best of all plans of few items; the
    search over powers of two as degrees, without which a step on links of 25 GB/s takes up to 10 % longer. Plans of one
    degree are compared too where few slots and documents make that cheap, or where all others stay far from the goal.
    """
    request, plans = problem.request, list[Priced]()

    def add_plan(micro_batches: list[MicroBatch]) -> None:
        plans.append((request.seconds(micro_batches), micro_batches))

    if request.mode == "free":
        add_plan(plan_free(problem))
    if not plans or plans[0][0] > CLOSE * goal:
        add_plan(plan_lockstep(problem, _search_steps(effort, problem)))
        if min(plans, key=itemgetter(0))[0] > CLOSE * goal:
            if few := plan_few_items(problem):
                add_plan(few[1])
            if powers := _keep_powers_of_two(problem):
                add_plan(plan_lockstep(powers, _search_steps(effort, powers)))
    best = min(plans, key=itemgetter(0))[0]
    if (request.slots <= COMPARED_SLOTS and len(request.lengths) <= COMPARED_DOCUMENTS) or best > DISTANT * goal:
        for micro_batches in _fixed_plans(problem, best):
            add_plan(micro_batches)
    return min(plans, key=itemgetter(0))[1]


def _search_steps(effort: EffortName, problem: Problem) -> int:
    """Return how many random changes are tried: the fewer the more items, as each takes longer.

    Many slots with few documents each take up to 7 % longer with 12 of them than with 40 (bench/plans/planner.py
    --tokens-per-slot 8192).
    """
    scale = {"fast": 1, "balanced": 4, "thorough": 16}[effort]
    size = len(problem.tokens) + problem.request.slots
    most = (65_000 // size) ** 2  # so that 8,192 slots take less than 5 s
    return scale * max(min(3, most), min(40, 4000 // size), min(10, 32 * problem.request.slots // size, most))


def _keep_powers_of_two(problem: Problem) -> Problem | None:
    """Return the problem with only powers of two as degrees; None where it has no plan or is not worth the time.

    On measured links groups of other degrees have slower types, or leave slots of a host over. Ideal links show no
    difference, many slots take long, and where all or none of the degrees are powers of two nothing is left to plan.
    There is no plan if the longest document needs a degree above the highest power.
    """
    request = problem.request
    degrees = tuple(degree for degree in problem.degrees if degree & (degree - 1) == 0)
    if request.cost.network is None or request.slots > HALVED_SLOTS or len(degrees) in (0, len(problem.degrees)):
        return None
    return Problem.of(request, degrees) if max(request.lengths) <= degrees[-1] * problem.cap else None


def _fixed_plans(problem: Problem, best: float) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of plans of one degree, where they could be better than `best` seconds.

    Such a plan takes the mean work of a slot and the launches and waits of the fewest micro-batches, or longer. Its
    documents are sorted by falling length, equal lengths by id: the order in the other plans.
    """
    request = problem.request
    for cp in problem.degrees:
        launch = request.cost.micro_batch_seconds + float(request.cost.latency_seconds(cp))
        least = (problem.mean_seconds + problem.least_micro_batches * launch) / request.cost.stages
        if request.slots % cp or max(request.lengths) > cp * problem.cap or least + request.cost.update_seconds >= best:
            continue
        packer = Packer.of(request, cp)
        yield [_sort_documents(batch) for batch in packer.micro_batches(packer.fastest_assignment())]


def _sort_documents(batch: MicroBatch) -> MicroBatch:
    groups: list[Group] = []
    for group in batch.groups:
        order = sorted(range(len(group.documents)), key=lambda i: (-group.lengths[i], group.documents[i]))
        documents, lengths = (tuple(values[i] for i in order) for values in (group.documents, group.lengths))
        groups.append(replace(group, documents=documents, lengths=lengths))
    return MicroBatch(tuple(groups))

"""Plans of forward passes, and what they are compared by: degrees, communication types, fewer rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from longspan.errors import PlanError, plural
from longspan.layout import Layout, check_lengths
from longspan.plan.check import heads_allow_degree
from longspan.plan.micro_batch import comm_type_text, fit_level_sizes
from longspan.plan.plan import Plan
from longspan.plan.planners.fixed import plan_fixed
from longspan.plan.planners.options import PlanOptions
from longspan.plan.planners.request import longest_item

MOST_ROUNDS = 8  # micro-batches for each stage, beyond which a fuller pipeline gains less than a ninth
NAMED = 4  # degrees after the best, in a line of reasons


def options_by_comm_type(options: PlanOptions, home: Layout, cp: int) -> list[PlanOptions]:
    """List the options under each type that comes into question at a degree, rings first. A type of `options` other
    than "auto" is the only one.

    Types that exchange heads come into question only if the query heads are known, and a2a if they allow the degree.
    Contiguous rows are even only under a2a: they take other types only where a2a is not possible.
    """
    if options.cp_comm_type != "auto":
        return [options_at_degree(options, cp)]
    heads_known = options.heads is not None
    a2a_possible = heads_known and heads_allow_degree(cp, options.heads, ("a2a",), home.tp)
    types = ["p2p", "all_gather"]
    # One slot sends nothing, so that all types are the same.
    if cp == 1:
        types = ["p2p"]
    elif options.partition == "contiguous":
        types = ["a2a"] if a2a_possible else types
    else:
        if a2a_possible:
            types.append("a2a")
        if heads_known:
            types.append("a2a+p2p")
    return [replace(options, cp_comm_type=kind, hierarchical_context_parallel_sizes=None) for kind in types]


def options_at_degree(options: PlanOptions, cp: int) -> PlanOptions:
    """Return the options of groups of one degree, whose sizes under a2a+p2p are fitted to it."""
    sizes = options.hierarchical_context_parallel_sizes
    if sizes is None or "a2a+p2p" not in options.types:
        return options
    return replace(options, hierarchical_context_parallel_sizes=fit_level_sizes(sizes, cp))


def plan_evaluation(
    make: Callable[[PlanOptions], Plan], lengths: Sequence[int], home: Layout, options: PlanOptions, widest: int
) -> Plan:
    """Make the plan of forward passes that is fastest through the home's stages, at the limit of rows or a lower one.
    `make` makes a plan under options that it is given; `widest` is the highest degree that a group of its plans may
    have. The limit is halved as long as that does not make the plan slower. Raises what `make` raises.
    """
    options = replace(options, cost=options.cost.forward_only())
    fastest = make(options)
    if home.pp == 1 or not lengths:
        return fastest
    # Limits from the least rows that hold the longest document in a group of `widest` slots, each twice the one before,
    # but none above twice a slot's mean rows, which would limit nothing, and at most MOST_ROUNDS micro-batches a stage.
    multiple = options.row_multiple
    mean_rows = sum(lengths) / home.slots
    least_rows = -(-longest_item(lengths, home, options) // (widest * multiple)) * multiple
    highest = min(options.max_tokens_per_slot or sum(lengths), math.ceil(2 * mean_rows))
    limits = [least_rows << doubling for doubling in range(32) if least_rows << doubling < highest]
    for rows in (limit for limit in reversed(limits) if limit * home.pp * MOST_ROUNDS >= mean_rows):
        plan = make(replace(options, max_tokens_per_slot=rows))
        if plan.predicted_seconds > fastest.predicted_seconds:
            break
        fastest = plan
    return fastest


def widest_dynamic_degree(home: Layout, options: PlanOptions, most: int | None = None) -> int:
    """Return the highest degree up to `most` (None: all slots) that a group of a dynamic plan may have by the query
    heads; 1 if they allow no higher one.
    """
    degrees = range(min(most or home.slots, home.slots), 1, -1)
    return next((degree for degree in degrees if options.allows(degree, home.tp)), 1)


def plan_type_text(plan: Plan) -> str:
    """Name the communication types of a plan, with their levels; "" where no group has several slots."""
    groups = [group for group in plan.groups if group.degree > 1]
    kinds = ((g.cp_comm_type,) if isinstance(g.cp_comm_type, str) else g.cp_comm_type for g in groups)
    names = list(dict.fromkeys(chain.from_iterable(kinds)))
    if names:
        return comm_type_text(names, (group.hierarchical_context_parallel_sizes for group in groups))
    return ""


class DegreeChoice(NamedTuple):
    """One degree of an evaluation: its plan, under the fastest type and at the best limit of rows, and the options of
    that type, which keep the limit that all degrees are compared under.
    """

    cp: int
    planned: Plan
    options: PlanOptions


@dataclass(frozen=True)
class DegreeComparison:
    """Every degree at which an evaluation is possible, the dynamic plan, and what was left out and why."""

    choices: tuple[DegreeChoice, ...]
    dynamic: Plan | None
    left_out: tuple[str, ...]

    @property
    def best(self) -> DegreeChoice:
        """The degree whose planned evaluation is fastest; of equally fast ones the first that was tried."""
        return min(self.choices, key=lambda choice: choice.planned.predicted_seconds)

    def reason(self, name: str = "") -> str:
        """Return in one line of numbers why the best degree is the best, for the evaluation set of this name."""
        best = self.best
        others = sorted(self.choices, key=lambda choice: choice.planned.predicted_seconds)[1:]
        # the fastest ones, in order of degree
        named = [choice for choice in self.choices if choice in others[:NAMED]]
        kind = f", {plan_type_text(best.planned)}" if best.cp > 1 else ""
        line = f"evaluation{f' of {name}' if name else ''} at cp {best.cp}{kind}: "
        line += plural(len(best.planned.lengths), "document")
        line += f" in {self._plan_time_text(best.planned)} predicted" if best.planned.cost.source else ""
        slower = ", ".join(f"cp {choice.cp} {self._plan_time_text(choice.planned)}" for choice in named)
        slower += f", {len(others) - NAMED} more slower" if len(others) > NAMED else ""
        dynamic = [f"dynamic plan {self._plan_time_text(self.dynamic)}"] if self.dynamic else []
        return "; ".join([line, *filter(None, [slower]), *dynamic, *self.left_out])

    def _plan_time_text(self, plan: Plan) -> str:
        """Under a cost of no machine seconds are written as times those of the best."""
        if plan.cost.source:
            return f"{plan.predicted_seconds:.3g} s"
        return f"{plan.predicted_seconds / self.best.planned.predicted_seconds:.2f} x as long"


def compare_degrees(
    lengths: Sequence[int],
    home: Layout,
    *,
    options: PlanOptions | None = None,
    dynamic_degrees: tuple[int, int | None] = (1, None),
) -> DegreeComparison:
    """Price forward passes over these documents at each degree, and by a dynamic plan.

    >>> compare_degrees([8192] * 1024, Layout(8192, tp=2, pp=4)).best.cp
    8

    `options` are those of the plans, with the cost of a slot. Their `cp_comm_type` "auto" takes at each degree the
    fastest type (`options_by_comm_type`). Degrees that do not divide the slots, at which the longest document does not
    fit, or that the heads do not allow, are left out. `max_tokens_per_slot` None takes the longest document.
    `dynamic_degrees` are the smallest and the largest (None: no limit) of the dynamic plan. Raises PlanError where no
    degree is possible.
    """
    lengths = check_lengths(lengths)
    options = options or PlanOptions()
    longest = max(lengths)
    multiple = options.row_multiple
    cap = options.max_tokens_per_slot or -(-longest // multiple) * multiple
    choices = list[DegreeChoice]()
    refused = list[str]()
    degrees = tuple(degree for degree in range(1, home.slots + 1) if home.slots % degree == 0)
    for cp in degrees:
        if longest > cp * (cap // multiple * multiple):
            refused.append(f"cp {cp} holds {plural(cp * cap, 'row')}, the longest document has {longest:,}")
        elif not options.allows(cp, home.tp):
            refused.append(f"cp {cp} does not divide {(options.heads or 0) // home.tp} query heads")
        else:
            choices.append(_price_degree(lengths, home, options, cp))
    if not choices:
        least = -(-longest // (home.slots * multiple)) * multiple
        raise PlanError(
            f"no degree of {degrees} is possible for an evaluation whose longest document has {longest} rows, at "
            f"max_tokens_per_slot {cap}: {'; '.join(refused)}; raise max_tokens_per_slot to {least} or more, or use "
            "another cp_comm_type"
        )
    comparison = DegreeComparison(tuple(choices), None, tuple(refused))
    from longspan.plan.dynamic.planner import plan_dynamic

    least_cp, most_cp = dynamic_degrees
    best = comparison.best.options

    def make_plan(options: PlanOptions) -> Plan:
        return plan_dynamic(lengths, home, min_cp=least_cp, max_cp=most_cp, options=options)

    try:
        dynamic = plan_evaluation(make_plan, lengths, home, best, widest_dynamic_degree(home, best, most_cp))
    except PlanError as error:
        return replace(comparison, left_out=(*refused, f"no dynamic plan: {error}"))
    return replace(comparison, dynamic=dynamic)


def _price_degree(lengths: tuple[int, ...], home: Layout, options: PlanOptions, cp: int) -> DegreeChoice:
    """The limit of rows that suits the pipeline is searched under the first type only, as each limit takes a plan."""
    first, *others = options_by_comm_type(options, home, cp)
    planned = plan_evaluation(lambda way: plan_fixed(lengths, home, cp, options=way), lengths, home, first, cp)
    choices = [DegreeChoice(cp, planned, first)]
    for way in others:
        limited = replace(way, cost=way.cost.forward_only(), max_tokens_per_slot=planned.max_tokens_per_slot)
        choices.append(DegreeChoice(cp, plan_fixed(lengths, home, cp, options=limited), way))
    return min(choices, key=lambda choice: choice.planned.predicted_seconds)

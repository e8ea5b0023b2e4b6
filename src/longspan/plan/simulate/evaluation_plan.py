"""The plan of an evaluation: priced for forward passes under its communication type, and for the pipeline's stages.

The limit of rows is an upper one: on a pipeline, fewer rows in more micro-batches fill the stages better, and launch
more. What planners make at a few limits below is compared by its time through the stages.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from longspan.layout import Layout
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.plan import Plan
from longspan.plan.planners.options import PlanOptions
from longspan.plan.simulate.simulate import simulate
from longspan.plan.simulate.which_type import with_price_of_type

MOST_ROUNDS = 8  # micro-batches for each stage, beyond which a fuller pipeline gains less than a ninth


def plan_evaluation(
    make: Callable[[PlanOptions], Plan], lengths: Sequence[int], home: Layout, options: PlanOptions, widest: int
) -> Plan:
    """The plan of `make` that is fastest through the home's stages, of those at the limit of rows and at lower ones.

    >>> options = PlanOptions(max_tokens_per_slot=8192)
    >>> make = lambda options: plan_fixed([8192] * 8, Layout(8, pp=4), 2, options=options)
    >>> len(plan_evaluation(make, [8192] * 8, Layout(8, pp=4), options, widest=2).micro_batches)  # doctest: +SKIP
    8

    `widest` is the highest degree that a group of `make` may have. The limit is halved as long as that does not make
    the plan slower. Raises what `make` raises at the limit itself.
    """
    options = evaluation_options(options)
    best = make(options)
    if home.pp == 1 or not lengths:
        return best
    seconds = simulate(best, pp=home.pp).seconds
    for rows in _lower_limits(lengths, home, options, widest):
        plan = make(replace(options, max_tokens_per_slot=rows))
        if (taken := simulate(plan, pp=home.pp).seconds) > seconds:
            break
        best, seconds = plan, taken
    return best


def evaluation_options(options: PlanOptions) -> PlanOptions:
    """The options priced for forward passes alone under their own communication type."""
    return with_price_of_type(replace(options, cost=options.cost.forward_only()))


def widest_degree(home: Layout, options: PlanOptions, most: int = 0) -> int:
    """The highest degree that a group of a dynamic plan may have, at most `most` (0: all slots)."""
    types = check_comm_types(options.cp_comm_type)
    degrees = range(min(most or home.slots, home.slots), 1, -1)
    return next((degree for degree in degrees if heads_allow(degree, options.heads, types, home.tp)), 1)


def _lower_limits(lengths: Sequence[int], home: Layout, options: PlanOptions, widest: int) -> Iterator[int]:
    """Limits of rows below the own one, half as many each time, down to those that just hold the longest document."""
    multiple, share = options.row_multiple, sum(lengths) / home.slots
    least = -(-max(lengths) // (widest * multiple)) * multiple
    most = min(options.max_tokens_per_slot or sum(lengths), math.ceil(2 * share))
    doubled = [least << doubling for doubling in range(32) if least << doubling < most]
    yield from (rows for rows in reversed(doubled) if rows * home.pp * MOST_ROUNDS >= share)

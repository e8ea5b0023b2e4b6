"""The longest document that fits: a search over memory alone, on plans of one document."""

from dataclasses import replace
from operator import itemgetter

from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.plan import MicroBatch, Plan
from longspan.plan.memory.memory_choice import any_choice_fits
from longspan.resolve.facts import Facts
from longspan.resolve.ways import UNIT, Way

MOST_ROWS = 1 << 26  # of a slot, which no GPU holds


def find_longest(config: RunConfig, facts: Facts) -> tuple[int, Way]:
    """Find the most tokens of one document that fit, and return them with their way; 0 where not even one UNIT fits.

    Where a ring holds more than the fastest types, it is taken. The degree is the one that is given, or all slots. A
    slot has whole multiples of UNIT rows (rounded up to what plans need), and at most MOST_ROWS. Only memory is
    computed for each length that is tried, on the plan of a short document changed to that length, for planning each
    would be slow; the longest that fits is planned anew, and shortened by 1/256 at a time until its own plan fits too.
    """
    way = Way(config, facts)
    ways = [way, way.ring_way()] if way.has_ring else [way]
    return max(map(_find_longest_of_way, ways), key=itemgetter(0))


def _find_longest_of_way(way: Way) -> tuple[int, Way]:
    """Find the most tokens of one document that fit under one way (0: none), and return them with the way at their
    rows. `way`: a configuration with the facts of its ranks, whose budget must be known. Its plans are fixed ones, at
    the degree that it gives or over all slots.
    """
    facts = way.facts
    home = facts.home
    budget = facts.budget
    assert budget is not None
    degree = (way.choice.degree if way.choice.has_one_degree else 0) or home.slots
    multiple = 2 * way.choice.options.row_multiple
    unit = -(-UNIT // multiple) * multiple
    way = way.with_context(planner="fixed", context_parallel_size=degree, max_tokens_per_slot=0)
    short = way.choice.plan((unit * degree,), home)

    def plan_of(units: int) -> Plan:
        """Change the plan of the short document to one of so many units a slot."""
        (group,) = short.micro_batches[0].groups
        if way.choice.options.cp_comm_type == AUTO:  # another length may get another type
            group = replace(group, cp_comm_type=AUTO, hierarchical_context_parallel_sizes=None)
        tokens = units * unit * degree
        group = replace(group, lengths=(tokens,), pad_to=None)
        return replace(short, lengths=(tokens,), micro_batches=(MicroBatch((group,)), *short.micro_batches[1:]))

    def fits(plan: Plan) -> bool:
        return any_choice_fits(way.memory_needs([plan]), budget, way.fixed_memory)

    # The number of units doubles until one does not fit; halving finds the last below that one.
    most = 0
    too_many = 1
    while too_many < MOST_ROWS // unit and fits(plan_of(too_many)):
        most, too_many = too_many, 2 * too_many
    while most + 1 < too_many:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(plan_of(middle)) else (most, middle)
    # attention may be shared in another way
    while most and not fits(way.choice.plan((most * unit * degree,), home)):
        most = max(0, most - 1 - most // 256)
    return most * unit * degree, way.with_context(max_tokens_per_slot=max(1, most) * unit)

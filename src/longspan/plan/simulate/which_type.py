"""The communication types under which a plan can be made, each with its own price, so that plans are compared at their
best.

A fixed plan that would run under all-to-all is not slower because a ring of its degree would be. Which type is fastest
is decided by plans of the same documents; types of hybrids are weighed with their partitions (`which_partition.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from longspan.layout import Layout
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.hierarchy import levels_at
from longspan.plan.plan import Plan
from longspan.plan.planners.options import PlanOptions


def options_of_types(options: PlanOptions, home: Layout, cp: int | None = None) -> list[PlanOptions]:
    """The options under each type that comes into question at a degree, rings first; None: in a dynamic plan.

    >>> [o.cp_comm_type for o in options_of_types(PlanOptions(cp_comm_type="auto", heads=8), Layout(8), 4)]
    ['p2p', 'all_gather', 'a2a', 'a2a+p2p']

    A type of `options` other than "auto" is the only one. Under "auto" these are p2p, all_gather and, where the query
    heads are known and allow it, a2a and a2a+p2p with every first level inside a node; contiguous rows are even under
    a2a alone, and take the others where the heads do not allow it.
    """
    if options.cp_comm_type != "auto":
        return [options if cp is None else options_at_degree(options, cp)]
    if cp == 1:
        return [_with_type(options, "p2p")]
    rings = [_with_type(options, "p2p"), _with_type(options, "all_gather")]
    exchanged = options.heads is not None and (cp is None or heads_allow(cp, options.heads, ("a2a",), home.tp))
    if exchanged and options.partition == "contiguous":
        return [_with_type(options, "a2a")]
    levels = (_with_type(options, "a2a+p2p", sizes) for sizes in _levels(options, home, cp))
    return [*rings, *([_with_type(options, "a2a")] if exchanged else []), *levels]


def options_at_degree(options: PlanOptions, cp: int) -> PlanOptions:
    """The options with the levels of a2a+p2p, where a layer has them, fitted to a degree."""
    sizes = options.hierarchical_context_parallel_sizes
    if sizes is None or "a2a+p2p" not in check_comm_types(options.cp_comm_type):
        return options
    levels = levels_at(sizes if isinstance(sizes, int) else tuple(sizes), cp)
    return replace(options, hierarchical_context_parallel_sizes=levels)


def with_price_of_type(options: PlanOptions) -> PlanOptions:
    """The options with the cost of groups of their own communication type; "auto" is priced as a ring."""
    sizes = options.hierarchical_context_parallel_sizes
    inner = 1 if sizes is None else sizes if isinstance(sizes, int) else sizes[0]
    return replace(options, cost=options.cost.under(options.cp_comm_type, inner))


def type_text(types: str | Sequence[str], sizes: Iterable[int | Sequence[int] | None] = ()) -> str:
    """A type, or those of a list, with its levels (a2a, p2p) where it has two; of several levels the widest a2a.

    >>> type_text("a2a+p2p", [(4, 2)]), type_text("a2a+p2p", [(2, 2), (4, 3)]), type_text(["p2p", "a2a", "p2p"])
    ('a2a+p2p (4, 2)', 'a2a+p2p, a2a of 4 at most', 'p2p/a2a')
    """
    name = types if isinstance(types, str) else "/".join(dict.fromkeys(types))
    levels = sorted({tuple(s) for s in sizes if s is not None and not isinstance(s, int)})
    if "a2a+p2p" not in name or not levels:
        return name
    return f"{name} {levels[0]}" if len(levels) == 1 else f"{name}, a2a of {levels[-1][0]} at most"


def type_of(plan: Plan) -> str:
    """The communication types of a plan's groups of several slots, in words; "" where every slot works alone."""
    groups = [g for g in chain.from_iterable(batch.groups for batch in plan.micro_batches) if g.degree > 1]
    kinds = (g.cp_comm_type if isinstance(g.cp_comm_type, str) else "/".join(g.cp_comm_type) for g in groups)
    names = list(dict.fromkeys(chain.from_iterable(kind.split("/") for kind in kinds)))
    return type_text(names, (g.hierarchical_context_parallel_sizes for g in groups)) if names else ""


def _with_type(options: PlanOptions, kind: str, sizes: int | tuple[int, int] | None = None) -> PlanOptions:
    return replace(options, cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes)


def _levels(options: PlanOptions, home: Layout, cp: int | None) -> Iterator[int | tuple[int, int]]:
    """First levels of two that the heads allow, inside a node; of a dynamic plan the first alone. None where the heads
    are not known."""
    if options.heads is None or options.partition == "contiguous":
        return
    heads, widest = options.heads // home.tp, home.slots if cp is None else cp
    for inner in range(2, widest):
        if widest % inner == 0 and options.node_size % inner == 0 and heads % inner == 0:
            yield inner if cp is None else (inner, cp // inner)

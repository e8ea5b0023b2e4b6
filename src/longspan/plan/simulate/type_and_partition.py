"""Communication types and partitions under which a plan can be made, each with its own price.

Plans are compared at their best: which type is fastest is decided by plans of the same documents. Types of hybrids are
compared together with partitions. Zigzag rows make a causal ring even, but give every document two runs on every slot,
so that bytes of states grow with documents; contiguous rows are one run a slot, and want an all-to-all of heads, which
is even however rows are dealt out. Models without state-space layers are not compared by partition.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from longspan.errors import LongspanError, PlanError
from longspan.layout import Layout
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.hierarchy import level_sizes
from longspan.plan.micro_batch import PARTITIONS, PartitionKind
from longspan.plan.plan import Plan
from longspan.plan.planners.options import PlanOptions


def list_type_options(options: PlanOptions, home: Layout, cp: int | None = None) -> list[PlanOptions]:
    """List the options under each type that comes into question at a degree (None: in a dynamic plan), rings first.

    >>> [o.cp_comm_type for o in list_type_options(PlanOptions(cp_comm_type="auto", heads=8), Layout(8), 4)]
    ['p2p', 'all_gather', 'a2a', 'a2a+p2p']

    A type of `options` other than "auto" is the only one. Under "auto" these are p2p, all_gather and, where the query
    heads are known and allow it, a2a and a2a+p2p with every first level inside a node. Contiguous rows, which are even
    only under a2a, take other types only where the heads do not allow a2a.
    """
    if options.cp_comm_type != "auto":
        return [options if cp is None else fit_to_degree(options, cp)]
    if cp == 1:  # one slot sends nothing, so that all types are the same
        return [_with_type(options, "p2p")]
    rings = [_with_type(options, "p2p"), _with_type(options, "all_gather")]
    exchanged = options.heads is not None and (cp is None or heads_allow(cp, options.heads, ("a2a",), home.tp))
    if exchanged and options.partition == "contiguous":
        return [_with_type(options, "a2a")]
    levels = [_with_type(options, "a2a+p2p")] if options.heads is not None and options.partition != "contiguous" else []
    return [*rings, *([_with_type(options, "a2a")] if exchanged else []), *levels]


def fit_to_degree(options: PlanOptions, cp: int) -> PlanOptions:
    """Fit the levels of a2a+p2p, where a layer of the options has them, to a degree."""
    sizes = options.hierarchical_context_parallel_sizes
    if sizes is None or "a2a+p2p" not in check_comm_types(options.cp_comm_type):
        return options
    levels = level_sizes(sizes if isinstance(sizes, int) else tuple(sizes), cp)
    return replace(options, hierarchical_context_parallel_sizes=levels)


def type_text(types: str | Sequence[str], sizes: Iterable[int | Sequence[int] | None] = ()) -> str:
    """Write a communication type, or those of a list, with its levels (a2a, p2p); of several levels the widest a2a.

    `sizes` are the levels of all groups; None and single numbers are left out.

    >>> type_text("a2a+p2p", [(4, 2)]), type_text("a2a+p2p", [(2, 2), (4, 3)]), type_text(["p2p", "a2a", "p2p"])
    ('a2a+p2p (4, 2)', 'a2a+p2p, a2a of 4 at most', 'p2p/a2a')
    """
    name = types if isinstance(types, str) else "/".join(dict.fromkeys(types))
    levels = sorted({tuple(s) for s in sizes if s is not None and not isinstance(s, int)})
    if "a2a+p2p" not in name or not levels:
        return name
    return f"{name} {levels[0]}" if len(levels) == 1 else f"{name}, a2a of {levels[-1][0]} at most"


def plan_type_text(plan: Plan) -> str:
    """Write the communication types of a plan's groups of several slots; "" if no group has several slots."""
    groups = [group for group in chain.from_iterable(batch.groups for batch in plan.micro_batches) if group.degree > 1]
    kinds = (
        group.cp_comm_type if isinstance(group.cp_comm_type, str) else "/".join(group.cp_comm_type) for group in groups
    )
    names = list(dict.fromkeys(chain.from_iterable(kind.split("/") for kind in kinds)))
    return type_text(names, (group.hierarchical_context_parallel_sizes for group in groups)) if names else ""


def _with_type(options: PlanOptions, kind: str) -> PlanOptions:
    """Return the options under this communication type, with the best sizes if it has two levels."""
    return replace(options, cp_comm_type=kind, hierarchical_context_parallel_sizes=None)


TYPES = ("a2a", "p2p")  # all_gather takes more memory the longer the documents are, which is not weighed
CLOSE = 1.02  # of the fastest: of ways so close the first is taken, contiguous before zigzag and a2a before p2p


@dataclass(frozen=True)
class PricedWay:
    """One way: the options of its plans, and the seconds that these are predicted to take."""

    options: PlanOptions
    seconds: float

    def __str__(self) -> str:
        return way_text(self.options)


@dataclass(frozen=True)
class PartitionChoice:
    """Every way that was possible, the chosen one first, then by time; and a text for each that was not possible."""

    ways: tuple[PricedWay, ...]
    left_out: tuple[str, ...]

    @property
    def options(self) -> PlanOptions:
        """The options of the chosen way."""
        return self.ways[0].options

    @property
    def reason(self) -> str:
        """Return why it was chosen, in one line: the seconds of each way, or ratios under a cost that is of no machine.

        >>> print(choice.reason)  # doctest: +SKIP
        contiguous under a2a: 1.2 s predicted; zigzag under p2p 1.9 s; contiguous under p2p 2.1 s
        """
        chosen_way, *further_ways = self.ways
        has_seconds = bool(chosen_way.options.cost.source)

        def way_time(way: PricedWay) -> str:
            return f"{way.seconds:.3g} s" if has_seconds else f"{way.seconds / chosen_way.seconds:.3f} x as long"

        first = f"{chosen_way}: {way_time(chosen_way)} predicted" if has_seconds else f"{chosen_way}, by cost"
        return "; ".join([first, *(f"{way} {way_time(way)}" for way in further_ways), *self.left_out])


def which_partition(
    seconds_of: Callable[[PlanOptions], float],
    options: PlanOptions,
    partition: Literal["auto"] | PartitionKind = "auto",
) -> PartitionChoice:
    """Price a hybrid's plans under each partition and type that comes into question.

    `seconds_of` makes a plan under the options of a way and returns its predicted seconds; a way that it refuses with a
    LongspanError is left out. A `partition` and a type of `options` other than "auto" are kept. Raises PlanError where
    nothing is possible.
    """
    ways, refused = list[PricedWay](), dict[str, str]()
    for way in _way_options(options, partition):
        try:
            ways.append(PricedWay(way, seconds_of(way)))
        except LongspanError as error:
            refused[way_text(way)] = str(error)
    if not ways:
        raise PlanError(f"no way to deal out rows is possible: {'; '.join(refused.values())}")
    least_seconds = min(way.seconds for way in ways)
    # Ways come in order of preference, so of those that take about as long the first is chosen.
    choice = next(way for way in ways if way.seconds <= CLOSE * least_seconds)
    further_ways = sorted((way for way in ways if way is not choice), key=lambda way: way.seconds)
    return PartitionChoice((choice, *further_ways), tuple(f"{name} is not possible" for name in refused))


def plan_with_partition(
    make: Callable[[PlanOptions], Plan], options: PlanOptions, partition: Literal["auto"] | PartitionKind = "auto"
) -> tuple[Plan, str]:
    """Make the plan of these options; also returns why the rows of a hybrid are dealt out as they are ("" for others).

    `partition` "auto" is the fastest partition for a hybrid, and zigzag for other models.
    """
    if options.cost.states is None:
        return make(replace(options, partition="zigzag" if partition == "auto" else partition)), ""
    choice = which_partition(lambda way: make(way).predicted_seconds, options, partition)
    return make(choice.options), f"rows {choice.reason}"


def way_text(options: PlanOptions) -> str:
    """Write a partition and the communication types under which a plan is made in words."""
    types: str | Sequence[str] = options.cp_comm_type
    kind = types if isinstance(types, str) else "/".join(dict.fromkeys(types))
    return f"{options.partition} under {kind}"


def _way_options(options: PlanOptions, partition: str) -> Iterator[PlanOptions]:
    """Yield the options of each way, contiguous before zigzag and a2a before p2p: of close ways the first wins."""
    types = TYPES if options.cp_comm_type == "auto" else (options.cp_comm_type,)
    for kind in reversed(PARTITIONS) if partition == "auto" else (partition,):
        for cp_comm_type in types:
            yield replace(options, partition=kind, cp_comm_type=cp_comm_type)

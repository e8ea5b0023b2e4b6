"""How the rows of a hybrid's groups should be dealt out, and under which communication type its attention shares them.

Zigzag rows make a causal ring even, but give every document two runs on every slot, so that bytes of states grow with
documents; contiguous rows are one run a slot, and want an all-to-all of heads, which is even however rows are dealt
out. Both are priced by plans of the same documents. Models without state-space layers are not weighed here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longspan.errors import LongspanError, PlanError
from longspan.plan.cost.cost import Cost
from longspan.plan.micro_batch import PARTITIONS, PartitionKind
from longspan.plan.planners.options import PlanOptions
from longspan.plan.simulate.which_type import with_price_of_type

TYPES = ("a2a", "p2p")  # all_gather takes more memory the longer the documents are, which is not weighed
CLOSE = 1.02  # of the fastest: of ways so close the first is taken, contiguous before zigzag and a2a before p2p


@dataclass(frozen=True)
class Dealing:
    """One way: the options of its plans, and the seconds that these are predicted to take."""

    options: PlanOptions
    seconds: float

    def __str__(self) -> str:
        return name_of(self.options)


@dataclass(frozen=True)
class PartitionChoice:
    """Every way that was possible, the chosen one first, then by time; and the words for what was not."""

    ways: tuple[Dealing, ...]
    left_out: tuple[str, ...]

    @property
    def options(self) -> PlanOptions:
        """Those of the chosen way."""
        return self.ways[0].options

    @property
    def reason(self) -> str:
        """Why it was chosen, in one line: the seconds of each way, or ratios under a cost that is of no machine.

        >>> print(choice.reason)  # doctest: +SKIP
        contiguous under a2a: 1.2 s predicted; zigzag under p2p 1.9 s; contiguous under p2p 2.1 s
        """
        best, *others = self.ways
        known = bool(best.options.cost.source)

        def time(way: Dealing) -> str:
            return f"{way.seconds:.3g} s" if known else f"{way.seconds / best.seconds:.3f} x as long"

        first = f"{best}: {time(best)} predicted" if known else f"{best}, by cost"
        return "; ".join([first, *(f"{way} {time(way)}" for way in others), *self.left_out])


def which_partition(
    seconds_of: Callable[[PlanOptions], float],
    options: PlanOptions,
    partition: Literal["auto"] | PartitionKind = "auto",
) -> PartitionChoice:
    """Price a hybrid's plans under each partition and type that comes into question.

    `seconds_of` plans under some options, of which the cost is that of the way, and gives the predicted seconds; what
    it refuses with a LongspanError is left out. A `partition` and a type of `options` other than "auto" are kept.
    Raises PlanError where nothing is possible.
    """
    ways, refused = list[Dealing](), dict[str, str]()
    for way in _ways(options, partition):
        try:
            ways.append(Dealing(way, seconds_of(way)))
        except LongspanError as error:
            refused[name_of(way)] = str(error)
    if not ways:
        raise PlanError(f"no way to deal out rows is possible: {'; '.join(refused.values())}")
    least = min(way.seconds for way in ways)
    chosen = next(way for way in ways if way.seconds <= CLOSE * least)
    others = sorted((way for way in ways if way is not chosen), key=lambda way: way.seconds)
    return PartitionChoice((chosen, *others), tuple(f"{name} is not possible" for name in refused))


def priced_as(cost: Cost, options: PlanOptions) -> Cost:
    """A hybrid's cost for groups of these options; the cost of another model as it is."""
    if cost.states is None:
        return cost
    return with_price_of_type(replace(options, cost=cost)).cost.for_partition(options.partition)


def name_of(options: PlanOptions) -> str:
    """A way in words."""
    types: str | Sequence[str] = options.cp_comm_type
    kind = types if isinstance(types, str) else "/".join(dict.fromkeys(types))
    return f"{options.partition} under {kind}"


def _ways(options: PlanOptions, partition: str) -> Iterator[PlanOptions]:
    types = TYPES if options.cp_comm_type == "auto" else (options.cp_comm_type,)
    for kind in reversed(PARTITIONS) if partition == "auto" else (partition,):
        for cp_comm_type in types:
            way = replace(options, partition=kind, cp_comm_type=cp_comm_type)
            yield replace(way, cost=priced_as(options.cost, way))

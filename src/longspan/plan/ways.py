"""Ways in which the same documents can be planned, compared by predicted time: types, partitions, degrees, fewer rows.

Rows of a hybrid: zigzag rows make a causal ring even, but the bytes of states grow with documents; contiguous rows are
one run a slot, and want an all-to-all of heads, which is even however rows are dealt out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from longspan.errors import LongspanError, PlanError, plural
from longspan.layout import Layout, check_lengths
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.micro_batch import PARTITIONS, Group, MicroBatch, PartitionKind, level_sizes, type_text
from longspan.plan.plan import Plan
from longspan.plan.planners.fixed import plan_fixed
from longspan.plan.planners.options import PlanOptions
from longspan.plan.step_times import timeline

TYPES = ("a2a", "p2p")  # of hybrids; all_gather takes more memory the longer the documents are, which is not weighed
CLOSE = 1.02  # of the fastest: of ways so close the first is taken, contiguous before zigzag and a2a before p2p
MOST_ROUNDS = 8  # micro-batches for each stage, beyond which a fuller pipeline gains less than a ninth
NAMED = 4  # degrees after the best, in a line of reasons


def list_type_options(options: PlanOptions, home: Layout, cp: int | None = None) -> list[PlanOptions]:
    """List the options under each type that comes into question at a degree (None: in a dynamic plan), rings first.

    >>> [o.cp_comm_type for o in list_type_options(PlanOptions(cp_comm_type="auto", heads=8), Layout(8), 4)]
    ['p2p', 'all_gather', 'a2a', 'a2a+p2p']

    A type of `options` other than "auto" is the only one. Types that exchange heads need them, and first levels inside
    a node. Contiguous rows, which are even only under a2a, take other types only where the heads do not allow a2a.
    """
    if options.cp_comm_type != "auto":
        return [options if cp is None else fit_to_degree(options, cp)]
    known, types = options.heads is not None, ["p2p", "all_gather"]
    exchanged = known and (cp is None or heads_allow(cp, options.heads, ("a2a",), home.tp))
    if cp == 1:  # one slot sends nothing, so that all types are the same
        types = ["p2p"]
    elif options.partition == "contiguous":
        types = ["a2a"] if exchanged else types
    else:
        types += ["a2a"] * exchanged + ["a2a+p2p"] * known
    return [replace(options, cp_comm_type=kind, hierarchical_context_parallel_sizes=None) for kind in types]


def fit_to_degree(options: PlanOptions, cp: int) -> PlanOptions:
    sizes = options.hierarchical_context_parallel_sizes
    if sizes is None or "a2a+p2p" not in check_comm_types(options.cp_comm_type):
        return options
    levels = level_sizes(sizes if isinstance(sizes, int) else tuple(sizes), cp)
    return replace(options, hierarchical_context_parallel_sizes=levels)


def plan_type_text(plan: Plan) -> str:
    groups = [group for group in chain.from_iterable(batch.groups for batch in plan.micro_batches) if group.degree > 1]
    kinds = ((g.cp_comm_type,) if isinstance(g.cp_comm_type, str) else g.cp_comm_type for g in groups)
    names = list(dict.fromkeys(chain.from_iterable(kinds)))
    return type_text(names, (group.hierarchical_context_parallel_sizes for group in groups)) if names else ""


@dataclass(frozen=True)
class PricedWay:
    """One way: the options of its plans, and the seconds that these are predicted to take."""

    options: PlanOptions
    seconds: float

    def __str__(self) -> str:
        return _way_text(self.options)


@dataclass(frozen=True)
class PartitionChoice:
    """Every way that was possible, the chosen one first, then by time; and a text for each that was not possible."""

    ways: tuple[PricedWay, ...]
    left_out: tuple[str, ...]

    @property
    def options(self) -> PlanOptions:
        return self.ways[0].options

    @property
    def reason(self) -> str:
        """Why it was chosen, in one line: the seconds of each way, or ratios under a cost that is of no machine."""
        chosen, *others = self.ways
        if chosen.options.cost.source:
            texts = [f"{chosen}: {chosen.seconds:.3g} s predicted", *(f"{way} {way.seconds:.3g} s" for way in others)]
        else:
            texts = [f"{chosen}, by cost", *(f"{way} {way.seconds / chosen.seconds:.3f} x as long" for way in others)]
        return "; ".join([*texts, *self.left_out])


def which_partition(
    seconds_of: Callable[[PlanOptions], float],
    options: PlanOptions,
    partition: Literal["auto"] | PartitionKind = "auto",
) -> PartitionChoice:
    """Price a hybrid's plans under each partition and type that comes into question; those that `partition` and
    `options` name are kept. `seconds_of` makes a plan under the options of a way and returns its predicted seconds; a
    way that it refuses with a LongspanError is left out. Raises PlanError where nothing is possible.
    """
    ways, refused = list[PricedWay](), dict[str, str]()
    types = TYPES if options.cp_comm_type == "auto" else (options.cp_comm_type,)
    for kind in reversed(PARTITIONS) if partition == "auto" else (partition,):
        for cp_comm_type in types:
            way = replace(options, partition=kind, cp_comm_type=cp_comm_type)
            try:
                ways.append(PricedWay(way, seconds_of(way)))
            except LongspanError as error:
                refused[_way_text(way)] = str(error)
    if not ways:
        raise PlanError(f"no way to deal out rows is possible: {'; '.join(refused.values())}")
    least_seconds = min(way.seconds for way in ways)
    choice = next(way for way in ways if way.seconds <= CLOSE * least_seconds)
    others = sorted((way for way in ways if way is not choice), key=lambda way: way.seconds)
    return PartitionChoice((choice, *others), tuple(f"{name} is not possible" for name in refused))


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


def _way_text(options: PlanOptions) -> str:
    return f"{options.partition} under {type_text(options.cp_comm_type)}"


def plan_evaluation(
    make: Callable[[PlanOptions], Plan], lengths: Sequence[int], home: Layout, options: PlanOptions, widest: int
) -> Plan:
    """Make the plan of forward passes that is fastest through the home's stages, at the limit of rows or a lower one.
    `widest` is the highest degree that a group of `make` may have. The limit is halved as long as that does not make
    the plan slower. Raises what `make` raises at the limit itself.
    """
    options = replace(options, cost=options.cost.forward_only())
    fastest = make(options)
    if home.pp == 1 or not lengths:
        return fastest
    # Limits from the least rows that hold the longest document in a group of `widest` slots, each twice the one before,
    # but none above twice a slot's mean rows, which would limit nothing, and at most MOST_ROUNDS micro-batches a stage.
    multiple, share = options.row_multiple, sum(lengths) / home.slots
    least_rows = -(-max(lengths) // (widest * multiple)) * multiple
    highest = min(options.max_tokens_per_slot or sum(lengths), math.ceil(2 * share))
    limits = [least_rows << doubling for doubling in range(32) if least_rows << doubling < highest]
    for rows in (rows for rows in reversed(limits) if rows * home.pp * MOST_ROUNDS >= share):
        plan = make(replace(options, max_tokens_per_slot=rows))
        if plan.predicted_seconds > fastest.predicted_seconds:
            break
        fastest = plan
    return fastest


def widest_degree(home: Layout, options: PlanOptions, most: int = 0) -> int:
    """Return the highest degree that a group of a dynamic plan may have, at most `most` (0: all slots)."""
    types = check_comm_types(options.cp_comm_type)
    degrees = range(min(most or home.slots, home.slots), 1, -1)
    return next((degree for degree in degrees if heads_allow(degree, options.heads, types, home.tp)), 1)


@dataclass(frozen=True)
class DegreeChoice:
    """One degree of an evaluation. `planned` has each document once, under the fastest type and at the best cap;
    `options` are those of its type, with the cap of the comparison. *Filled*, as evaluation loops do: one document a
    group and micro-batch, and documents repeated until the last pass keeps the pipeline full, `filled_steps` in all.
    """

    cp: int
    filled_steps: int
    filled_seconds: float
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
        """Why the best degree is the best, of the evaluation set of this name, in one line of numbers."""
        best = self.best
        others = sorted(self.choices, key=lambda choice: choice.planned.predicted_seconds)[1:]
        named = [choice for choice in self.choices if choice in others[:NAMED]]  # by degree, not time
        kind = f", {plan_type_text(best.planned)}" if best.cp > 1 else ""
        line = f"evaluation{f' of {name}' if name else ''} at cp {best.cp}{kind}: "
        line += plural(len(best.planned.lengths), "document")
        line += f" in {self._time_text(best.planned)} predicted" if best.planned.cost.source else ""
        slower = ", ".join(f"cp {choice.cp} {self._time_text(choice.planned)}" for choice in named)
        slower += f", {len(others) - NAMED} more slower" if len(others) > NAMED else ""
        dynamic = [f"dynamic plan {self._time_text(self.dynamic)}"] if self.dynamic else []
        return "; ".join([line, *filter(None, [slower]), *dynamic, *self.left_out])

    def _time_text(self, plan: Plan) -> str:
        if plan.cost.source:
            return f"{plan.predicted_seconds:.3g} s"
        return f"{plan.predicted_seconds / self.best.planned.predicted_seconds:.2f} x as long"


def which_degree(
    lengths: Sequence[int],
    home: Layout,
    *,
    options: PlanOptions | None = None,
    degrees: Sequence[int] | None = None,
    accumulation: int | None = None,
    dynamic_degrees: tuple[int, int] = (1, 0),
) -> DegreeComparison:
    """Price forward passes over these documents at each degree, and by a dynamic plan.

    >>> which_degree([8192] * 1024, Layout(8192, tp=2, pp=4)).best.cp
    4

    `options` are those of the plans, with the cost of a slot. Their `cp_comm_type` "auto" takes at each degree the
    fastest type (`list_type_options`). Degrees (default: all that divide the slots) at which the longest document does
    not fit, or that the heads do not allow, are left out. `accumulation` micro-batches keep the pipeline full (default:
    the stages). `max_tokens_per_slot` None takes the longest document. `dynamic_degrees` are the smallest and the
    largest (0: no limit) of the dynamic plan. Raises PlanError where no degree is possible.
    """
    lengths, options = check_lengths(lengths), options or PlanOptions()
    longest, multiple = max(lengths), options.row_multiple
    cap = options.max_tokens_per_slot or -(-longest // multiple) * multiple
    heads, types = options.heads, check_comm_types(options.cp_comm_type)
    choices, refused = list[DegreeChoice](), list[str]()
    degrees = tuple(degrees or (d for d in range(1, home.slots + 1) if home.slots % d == 0))
    for cp in degrees:
        if longest > cp * (cap // multiple * multiple):
            refused.append(f"cp {cp} holds {plural(cp * cap, 'row')}, the longest document has {longest:,}")
        elif not heads_allow(cp, heads, types, home.tp):
            refused.append(f"cp {cp} does not divide {(heads or 0) // home.tp} query heads")
        else:
            choices.append(_price_degree(lengths, home, options, cp, accumulation or home.pp))
    if not choices:
        least = -(-longest // (home.slots * multiple)) * multiple
        raise PlanError(
            f"no degree of {degrees} is possible for an evaluation whose longest document has {longest} rows, at "
            f"max_tokens_per_slot {cap}: {'; '.join(refused)}; raise max_tokens_per_slot to {least} or more, or use "
            "another cp_comm_type"
        )
    comparison = DegreeComparison(tuple(choices), None, tuple(refused))
    from longspan.plan.dynamic import plan_dynamic

    (least_cp, most_cp), best = dynamic_degrees, comparison.best.options

    def make(options: PlanOptions) -> Plan:
        return plan_dynamic(lengths, home, min_cp=least_cp, max_cp=most_cp or None, options=options)

    try:
        dynamic = plan_evaluation(make, lengths, home, best, widest_degree(home, best, most_cp))
    except PlanError as error:
        return replace(comparison, left_out=(*refused, f"no dynamic plan: {error}"))
    return replace(comparison, dynamic=dynamic)


def _price_degree(
    lengths: tuple[int, ...], home: Layout, options: PlanOptions, cp: int, accumulation: int
) -> DegreeChoice:
    """The limit of rows that suits the pipeline is searched under the first type only, as each limit takes a plan."""
    first, *others = list_type_options(options, home, cp)
    planned = plan_evaluation(lambda way: plan_fixed(lengths, home, cp, options=way), lengths, home, first, cp)
    plans = [(planned, first)]
    for way in others:
        limited = replace(way, cost=way.cost.forward_only(), max_tokens_per_slot=planned.max_tokens_per_slot)
        plans.append((plan_fixed(lengths, home, cp, options=limited), way))
    planned, way = min(plans, key=lambda pair: pair[0].predicted_seconds)
    groups, usual = home.slots // cp, planned.micro_batches[0].groups[0]
    steps = -(-len(lengths) // (groups * accumulation)) * groups * accumulation
    filled = [
        replace(usual, slots=tuple(range(g * cp, (g + 1) * cp)), documents=(d,), lengths=(lengths[d],), pad_to=None)
        for g, d in ((step % groups, step % len(lengths)) for step in range(steps))
    ]
    batches = [MicroBatch(tuple[Group, ...](filled[at : at + groups])) for at in range(0, steps, groups)]
    seconds = timeline(batches, home.slots, planned.cost, node_size=options.node_size).step_seconds
    return DegreeChoice(cp, steps, seconds, planned, way)

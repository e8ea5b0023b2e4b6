"""Plans of evaluations: fitted to the pipeline's stages, and compared over context-parallel degrees and types.

The limit of rows is an upper one: on a pipeline, fewer rows in more micro-batches fill the stages better, and launch
more. `plan_evaluation` compares plans at a few limits by their time through the stages.

`which_degree` prices two ways at each degree. *Filled*: one document a group and micro-batch, and as many micro-batches
as keep the pipeline full, repeating documents if there are too few; what evaluation loops do today. *Planned*:
`plan_fixed`, each document once, packed so that the pipeline is used best, under the fastest communication type.
`plan_dynamic` is priced as well, a degree for each document. All are forward passes only (`Cost.forward_only`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from longspan.errors import PlanError, plural
from longspan.layout import Layout, check_lengths
from longspan.plan.check import check_comm_types, heads_allow
from longspan.plan.dynamic import plan_dynamic
from longspan.plan.micro_batch import Group, MicroBatch
from longspan.plan.plan import Plan
from longspan.plan.planners.fixed import plan_fixed
from longspan.plan.planners.options import PlanOptions
from longspan.plan.simulate.type_and_partition import list_type_options, plan_type_text
from longspan.plan.timeline import predicted_seconds

MOST_ROUNDS = 8  # micro-batches for each stage, beyond which a fuller pipeline gains less than a ninth


def plan_evaluation(
    make: Callable[[PlanOptions], Plan], lengths: Sequence[int], home: Layout, options: PlanOptions, widest: int
) -> Plan:
    """Make the plan that is fastest through the home's stages, of those at the limit of rows and at lower ones.

    >>> options = PlanOptions(max_tokens_per_slot=8192)
    >>> make = lambda options: plan_fixed([8192] * 8, Layout(8, pp=4), 2, options=options)
    >>> len(plan_evaluation(make, [8192] * 8, Layout(8, pp=4), options, widest=2).micro_batches)  # doctest: +SKIP
    8

    `widest` is the highest degree that a group of `make` may have. The limit is halved as long as that does not make
    the plan slower. Raises what `make` raises at the limit itself.
    """
    options = evaluation_options(options)
    fastest = make(options)
    if home.pp == 1 or not lengths:
        return fastest
    for rows in _lower_limits(lengths, home, options, widest):
        plan = make(replace(options, max_tokens_per_slot=rows))
        if plan.predicted_seconds > fastest.predicted_seconds:
            break
        fastest = plan
    return fastest


def evaluation_options(options: PlanOptions) -> PlanOptions:
    """Return the options with the cost of forward passes only."""
    return replace(options, cost=options.cost.forward_only())


def widest_degree(home: Layout, options: PlanOptions, most: int = 0) -> int:
    """Return the highest degree that a group of a dynamic plan may have, at most `most` (0: all slots)."""
    types = check_comm_types(options.cp_comm_type)
    degrees = range(min(most or home.slots, home.slots), 1, -1)
    return next((degree for degree in degrees if heads_allow(degree, options.heads, types, home.tp)), 1)


def _lower_limits(lengths: Sequence[int], home: Layout, options: PlanOptions, widest: int) -> Iterator[int]:
    """Yield limits of rows below that of the options, the highest first, each half of the one before.

    The limits are the least rows a slot that hold the longest document in a group of `widest` slots, doubled again and
    again. Left out are limits above twice a slot's mean rows, which would limit nothing, and limits that would make
    more than `MOST_ROUNDS` micro-batches for each stage.
    """
    multiple, share = options.row_multiple, sum(lengths) / home.slots
    least_rows = -(-max(lengths) // (widest * multiple)) * multiple
    highest = min(options.max_tokens_per_slot or sum(lengths), math.ceil(2 * share))
    limits = [least_rows << doubling for doubling in range(32) if least_rows << doubling < highest]
    yield from (rows for rows in reversed(limits) if rows * home.pp * MOST_ROUNDS >= share)


NAMED = 4  # degrees after the best, in a line of reasons


@dataclass(frozen=True)
class DegreeChoice:
    """One degree: `groups` of `cp` slots. A document-step is one document through the model once.

    A filled evaluation makes `passes` passes of the micro-batches that fill the pipeline; of its `filled_steps`
    document-steps those beyond the number of documents are wasted. `planned` has each document once, under the fastest
    type and at the best cap. `options` are those of its type, with the cap of the comparison.
    """

    cp: int
    groups: int
    passes: int
    filled_steps: int
    filled_seconds: float
    planned: Plan
    options: PlanOptions

    @property
    def wasted_steps(self) -> int:
        """Document-steps whose result is thrown away."""
        return self.filled_steps - len(self.planned.lengths)

    @property
    def cp_comm_type(self) -> str:
        """The communication type, with its sizes where it has two levels."""
        return plan_type_text(self.planned)


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
        """Return why the best degree is the best, of the evaluation set of this name, in one line of numbers.

        >>> print(which_degree([8192] * 1024, Layout(8192, tp=2, pp=4)).reason())  # doctest: +SKIP
        evaluation at cp 4, p2p: 1,024 documents in 0.173 s predicted; cp 1 0.366 s, cp 2 0.234 s, cp 8 0.211 s; ...
        """
        best = self.best
        by_time = sorted(self.choices, key=lambda choice: choice.planned.predicted_seconds)
        named_choices = [choice for choice in self.choices if choice in by_time[1 : 1 + NAMED]]  # by degree, not time
        further_count = len(by_time) - 1 - len(named_choices)
        kind = f", {best.cp_comm_type}" if best.cp > 1 else ""
        documents = plural(len(best.planned.lengths), "document")
        slower = ", ".join(f"cp {choice.cp} {self._time_text(choice.planned)}" for choice in named_choices)
        slower += f", {further_count} more slower" if further_count else ""
        dynamic = [f"dynamic plan {self._time_text(self.dynamic)}"] if self.dynamic else []
        choice_text = f"evaluation{f' of {name}' if name else ''} at cp {best.cp}{kind}: {documents}"
        if self.best.planned.cost.source:
            choice_text += f" in {self._time_text(best.planned)} predicted"
        return "; ".join([choice_text, *filter(None, [slower]), *dynamic, *self.left_out])

    def _time_text(self, plan: Plan) -> str:
        """Write a plan's seconds, or under a cost that is of no machine their ratio to the best degree's."""
        if plan.cost.source:
            return f"{plan.predicted_seconds:.3g} s"
        return f"{plan.predicted_seconds / self.best.planned.predicted_seconds:.2f} x as long"


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """The documents and machine of one comparison; `options` are priced for forward passes."""

    lengths: tuple[int, ...]
    home: Layout
    options: PlanOptions
    accumulation: int

    @property
    def cap(self) -> int:
        """Rows that a slot may hold; without a limit, the longest document, in whole row multiples."""
        return self.options.max_tokens_per_slot or self.least_cap(1)

    def least_cap(self, cp: int) -> int:
        """Return the least rows of a slot, in whole row multiples, at which `cp` slots hold the longest document."""
        return -(-max(self.lengths) // (cp * self.options.row_multiple)) * self.options.row_multiple


def which_degree(
    lengths: Sequence[int],
    home: Layout,
    *,
    options: PlanOptions | None = None,
    degrees: Sequence[int] | None = None,
    accumulation: int | None = None,
    dynamic_degrees: tuple[int, int] = (1, 0),
) -> DegreeComparison:
    """Price an evaluation of these documents at each degree, and by a dynamic plan.

    >>> which_degree([8192] * 1024, Layout(8192, tp=2, pp=4)).best.cp
    4

    `options` are those of the plans, with the cost of a slot. Their `cp_comm_type` "auto" takes at each degree the
    fastest type: p2p, all_gather and, where the query `heads` are known, a2a and a2a+p2p with a first level inside a
    node. Degrees (default: all that divide the slots) at which the longest document does not fit, or that the
    heads do not allow, are left out. `accumulation` micro-batches keep the pipeline full (default: the stages).
    `max_tokens_per_slot` None takes the longest document. `dynamic_degrees` are the smallest and the largest (0: no
    limit) of the dynamic plan. Raises PlanError where no degree is possible.
    """
    options = options or PlanOptions()
    evaluation = _Evaluation(
        lengths=check_lengths(lengths),
        home=home,
        options=replace(options, cost=options.cost.forward_only()),
        accumulation=accumulation or home.pp,
    )
    degrees_to_try = list(degrees or (d for d in range(1, home.slots + 1) if home.slots % d == 0))
    refused = {cp: reason for cp in degrees_to_try if (reason := _refusal_text(evaluation, cp))}
    if len(refused) == len(degrees_to_try):
        least_cap = evaluation.least_cap(home.slots)
        raise PlanError(
            f"no degree of {tuple(degrees_to_try)} is possible for an evaluation whose longest document has "
            f"{max(evaluation.lengths)} rows, at max_tokens_per_slot {evaluation.cap}: {'; '.join(refused.values())}; "
            f"raise max_tokens_per_slot to {least_cap} or more, or use another cp_comm_type"
        )
    choices = tuple(_price_degree(evaluation, cp) for cp in degrees_to_try if cp not in refused)
    comparison = DegreeComparison(choices, None, tuple(refused.values()))
    dynamic, why_not = _dynamic_plan(evaluation, comparison.best.options, *dynamic_degrees)
    return replace(comparison, dynamic=dynamic, left_out=(*comparison.left_out, *why_not))


def _refusal_text(evaluation: _Evaluation, cp: int) -> str:
    """Return why an evaluation cannot run at a degree; "" where it can."""
    options, longest = evaluation.options, max(evaluation.lengths)
    if longest > cp * (evaluation.cap // options.row_multiple * options.row_multiple):
        return f"cp {cp} holds {plural(cp * evaluation.cap, 'row')}, the longest document has {longest:,}"
    if not heads_allow(cp, options.heads, check_comm_types(options.cp_comm_type), evaluation.home.tp):
        return f"cp {cp} does not divide {(options.heads or 0) // evaluation.home.tp} query heads"
    return ""


def _price_degree(evaluation: _Evaluation, cp: int) -> DegreeChoice:
    """Price an evaluation at a degree: planned, each document once, and filled up with repeated documents."""
    planned, options = _find_fastest_type(evaluation, cp)
    slots, accumulation = evaluation.home.slots, evaluation.accumulation
    batches = _fill_passes(evaluation.lengths, slots, cp, accumulation, planned.micro_batches[0].groups[0])
    filled_seconds = predicted_seconds(batches, slots, planned.cost, node_size=options.node_size)
    steps = sum(len(batch.groups) for batch in batches)
    return DegreeChoice(cp, slots // cp, len(batches) // accumulation, steps, filled_seconds, planned, options)


def _fill_passes(lengths: tuple[int, ...], slots: int, cp: int, accumulation: int, planned: Group) -> list[MicroBatch]:
    """Fill whole passes of `accumulation` micro-batches, each group of `cp` slots, like `planned`, with one document.

    After the last document the first one follows again, and so on until the last pass is full.
    """
    groups, kind, levels = slots // cp, planned.cp_comm_type, planned.hierarchical_context_parallel_sizes
    slots_of_groups = [tuple(range(g * cp, (g + 1) * cp)) for g in range(groups)]
    passes = -(-len(lengths) // (groups * accumulation))
    batches: list[MicroBatch] = []
    for start in range(0, passes * accumulation * groups, groups):
        documents = [d % len(lengths) for d in range(start, start + groups)]
        batch = (Group(slots_of_groups[g], (d,), (lengths[d],), kind, levels) for g, d in enumerate(documents))
        batches.append(MicroBatch(tuple(batch)))
    return batches


def _find_fastest_type(evaluation: _Evaluation, cp: int) -> tuple[Plan, PlanOptions]:
    """Make a plan under each communication type; return the fastest and the options of its type.

    The limit of rows that suits the pipeline is searched under the first type only, as each limit takes a plan; the
    other types get the same limit.
    """
    lengths, home = evaluation.lengths, evaluation.home
    first_options, *further_options = list_type_options(evaluation.options, home, cp)
    plan = plan_evaluation(
        lambda options: plan_fixed(lengths, home, cp, options=options), lengths, home, first_options, cp
    )
    plans = [(plan, first_options)]
    for options in further_options:
        limited_options = replace(evaluation_options(options), max_tokens_per_slot=plan.max_tokens_per_slot)
        plans.append((plan_fixed(lengths, home, cp, options=limited_options), options))
    return min(plans, key=lambda pair: pair[0].predicted_seconds)


def _dynamic_plan(
    evaluation: _Evaluation, options: PlanOptions, min_cp: int, max_cp: int
) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the dynamic plan of these degrees under these options, and (); or None, and why."""
    lengths, home = evaluation.lengths, evaluation.home

    def make_plan(options: PlanOptions) -> Plan:
        return plan_dynamic(lengths, home, min_cp=min_cp, max_cp=max_cp or None, options=options)

    try:
        return plan_evaluation(make_plan, lengths, home, options, widest_degree(home, options, max_cp)), ()
    except PlanError as error:
        return None, (f"no dynamic plan: {error}",)

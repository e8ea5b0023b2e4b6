"""The search behind "auto": ways to run the coming steps, what fits of them, and which is fastest.

A way is a configuration that leaves nothing of its plans open. Its plans are made as training makes them, and its
memory is chosen by a plan of memory. Ways of one planner and degree differ in the rows of a slot: these are compared
by the heaviest steps, and the best of each planner and degree by the steps of `Facts.timed_steps`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from statistics import mean
from typing import Any

from longspan.config.keys import AUTO
from longspan.config.memory_keys import fixed_memory_keys
from longspan.config.plan_section import ONE_DEGREE
from longspan.config.sections import RunConfig
from longspan.errors import LayoutError, LongspanError, PlanError
from longspan.layout import Layout
from longspan.plain_text import gib_text
from longspan.plan import (
    Cost,
    FixedMemory,
    MemoryBudget,
    MemoryNeeds,
    MemoryPlan,
    MemorySettings,
    MicroBatch,
    Plan,
)
from longspan.plan.memory.memory_choice import any_choice_fits, choose_fastest_memory, leanest_plans
from longspan.resolve.evaluation import options_at_degree
from longspan.resolve.facts import Facts
from longspan.resolve.planner_config import PlannerConfig, home_of
from longspan.resolve.run_cost import find_run_cost, memory_settings_of_run

UNIT = 1024  # rows of a slot, by which the most rows are above the mean
# No GPU holds so many rows of a slot.
MOST_ROWS = 1 << 26
MOST_EP = 8
# So many limits of rows are compared.
LIMITS = 5
UNEVEN = 1.25  # times the mean rows of images in a step, for steps with more of them


@dataclass(frozen=True)
class BindingKeys:
    """Which of two keys hold. If `planner` is false, every planner is tried, whatever the key says; if `ep` is false, a
    home whose slots share experts is tried too. Other keys that are not "auto" or 0 always hold.
    """

    planner: bool = True
    ep: bool = True


@dataclass(frozen=True)
class Way:
    """One way to run the coming steps: its configuration, and the facts with its home. `is_ring`: `ring_way` made it,
    in which groups go round a ring, because nothing fits with the fastest type of each group.
    """

    config: RunConfig
    facts: Facts
    is_ring: bool = False

    @property
    def has_ring(self) -> bool:
        """Whether `ring_way` is another way, of less memory where groups exchange heads or gather keys."""
        return self.config.context.cp_comm_type == AUTO and self.facts.home.slots > 1

    def ring_way(self) -> "Way":
        """Return this way with all groups in a ring, whatever type is fastest for them."""
        return replace(self.with_context(cp_comm_type="p2p"), is_ring=True)

    def with_context(self, **keys: Any) -> "Way":
        """Return this way with other keys of [context]."""
        return replace(self, config=self.config.with_keys("context", **keys))

    @cached_property
    def choice(self) -> PlannerConfig:
        """How steps are planned. A `node_size` that the keys leave open is the machine's."""
        config = with_node_size_of_machine(self.config, self.facts)
        return PlannerConfig.training(config, cost=self.cost(), heads=self.facts.heads)

    def cost(self, memory: MemoryPlan | None = None, notes: list[str] | None = None) -> Cost:
        """Return the cost of this way's model on the machine, with what a plan of memory recomputes and gathers (None:
        what the keys say). Lines on what is unusual about prices are appended to `notes`.
        """
        facts = self.facts
        return find_run_cost(
            self.config,
            facts.model,
            (list[str]() if notes is None else notes).append,
            gpu=facts.gpu,
            machine=facts.machine,
            slots=facts.home.slots,
            target_share=facts.target_share,
            memory=memory,
            teacher=facts.teacher,
        )

    @cached_property
    def memory_settings(self) -> MemorySettings:
        """The settings of the run's plan of memory. A slot encodes its share of a step's image rows, of these at most
        encoder.max_tokens at once (0: all).
        """
        facts = self.facts
        rows = math.ceil(UNEVEN * facts.image_rows / facts.home.slots)
        rows_at_once = min(rows, self.config.encoder.max_tokens or rows)
        settings = memory_settings_of_run(
            self.config,
            gpu=facts.gpu,
            encoder_rows=rows_at_once,
            state_numbers=facts.state_numbers,
            teacher=facts.teacher,
        )
        return replace(settings, scan_kernels=settings.scan_kernels and facts.scan_kernels)

    @property
    def fixed_memory(self) -> FixedMemory:
        """The keys of memory that are given by hand."""
        return fixed_memory_keys(self.config, gpu=self.facts.gpu)

    @cached_property
    def _plan_once(self) -> Callable[[int], Plan]:
        return cache(partial(self.facts.plan_step, self.choice))

    def plan_steps(self, steps: Sequence[int]) -> list[Plan]:
        """Plan steps as training does; each is planned once."""
        return list(map(self._plan_once, steps))

    def memory_needs(self, plans: Sequence[Plan]) -> MemoryNeeds:
        """Count what a run of these plans needs, before it is decided what layers keep."""
        return self.facts.memory_model(self.memory_settings).needs(plans)

    def choose_memory(self, plans: Sequence[Plan], budget: MemoryBudget) -> MemoryPlan:
        """Choose the fastest plan of memory that fits all these plans. Raises PlanError, with the bytes."""
        return choose_fastest_memory(self.memory_needs(plans), budget, self.fixed_memory)

    def step_seconds(self, plans: Sequence[Plan], memory: MemoryPlan | None) -> float:
        """Return the mean seconds of a step over some plans: those by the cost of the plan of memory (None: those that
        the plans have), and what layers add beyond its settings. That is known for the largest micro-batch, which has
        `memory.rows` rows a slot, and is scaled to the tokens of each step.
        """
        if memory is None:
            return mean(plan.predicted_seconds for plan in plans)
        home = self.facts.home
        cost = self.cost(memory).shared_by(home.tp)
        seconds_of_largest = self.memory_needs(plans).prices.seconds_beyond_settings(memory)
        token_seconds = seconds_of_largest / (memory.rows * home.slots)
        return mean(plan.timeline(cost).step_seconds + token_seconds * plan.tokens for plan in plans)

    def fullest_plans(self, *, rows_open: bool) -> list[Plan]:
        """Return the plans that need most memory. If only few steps are to come, these are all of their plans.

        Of one degree, under a limit of rows that is given (not `rows_open`), all coming steps are planned under a
        simple cost, if all are looked at, and the fullest four under the real one. In other cases, and if one of these
        four shares prefixes, as the simple plans do not, they are the plans of the heaviest steps, and one that fills
        the slots: every slot up to the limit, or, without one, the longest document alone. Without a limit steps that
        share prefixes are planned without sharing too, as other steps may be.
        """
        facts = self.facts
        choice = self.choice
        limit = choice.options.max_tokens_per_slot
        if facts.sees_all:
            return self.plan_steps(facts.coming_steps)
        if choice.has_one_degree and not rows_open and facts.coming_steps.stop == facts.steps:
            simple = replace(choice, options=replace(choice.options, cost=Cost(), cp_comm_type="p2p"))
            rows = ((simple.plan(facts.lengths(step), facts.home).most_rows, step) for step in facts.coming_steps)
            fullest = self.plan_steps([step for _, step in nlargest(4, rows)])
            if all(plan.parents is None for plan in fullest):
                return fullest
        plans = self.plan_steps(facts.heaviest_steps)
        if not limit:
            if any(plan.parents for plan in plans):
                plans += [choice.plan(facts.lengths(step), facts.home) for step in facts.heaviest_steps]
            return [*plans, choice.plan((facts.longest_document,), facts.home)]
        multiple = choice.options.row_multiple
        most_tokens = max(sum(facts.lengths(step)) for step in facts.heaviest_steps)
        rows = min(limit, most_tokens) // multiple * multiple
        return [*plans, self.plan_full_slots(max(rows, multiple))]

    def plan_full_slots(self, rows: int) -> Plan:
        """Make a plan with `rows` rows on every slot in each micro-batch, of as many micro-batches as a pipeline holds:
        a document in each of the widest groups.
        """
        home = self.facts.home
        choice = self.choice
        degree = choice.widest_even_degree(home)
        in_flight = max(1, home.pp * self.config.parallel.vpp)  # micro-batches that a pipeline holds at once
        lengths = [rows * degree] * (home.slots // degree * in_flight)
        # without a pipeline's bubble in the price, for which more and smaller micro-batches would be made
        options = replace(
            choice.options, max_tokens_per_slot=rows, cost=replace(choice.options.cost, chunks=1 << 20)
        )
        return replace(choice, options=options).at_degree(degree, longest=lengths[0]).plan(lengths, home)

    def limits_of_rows(self) -> list[int]:
        """List limits of rows worth comparing, rising: from what the longest document needs to a step in one
        micro-batch.

        They grow by one ratio, of at least 2, and are multiples of what plans need: a slot has two parts of a document,
        each of a whole `row_multiple`. The highest is what the fullest slot has if a step is one micro-batch: its rows
        of the longest document (in dynamic plans all of them, as at degree 1), or the mean if that is more, plus UNIT
        for uneven groups. If few steps are to come, a limit that no packing exceeds is one more: with so few groups
        slots may be that uneven.
        """
        choice = self.choice
        home = self.facts.home
        unit = 2 * choice.options.row_multiple
        longest = self.facts.longest_document
        least = _round_up(-(-longest // choice.widest_even_degree(home)), unit)
        degree = (choice.degree if choice.has_one_degree else None) or 1
        mean_rows = -(-self.facts.most_tokens // home.slots)
        most = max(longest // degree, mean_rows) + UNIT
        ratio = max(2.0, (max(most, least) / least) ** (1 / (LIMITS - 1)))
        limits = [_round_up(min(int(least * ratio**i), most), unit) for i in range(LIMITS)]
        if self.facts.sees_all:
            limits.append(_round_up(longest // degree + mean_rows, unit))
        return sorted({least, *(limit for limit in limits if limit > least)})


def with_node_size_of_machine(config: RunConfig, facts: Facts) -> RunConfig:
    """Return the configuration with the slots of the machine's hosts, of which one may hold all ranks, in place of a
    node_size "auto".
    """
    if config.context.node_size != AUTO:
        return config
    ranks_of_host = min(facts.machine.node_size, len(facts.home.ranks))
    return config.with_keys("context", node_size=max(1, ranks_of_host // facts.home.tp))


def set_default_mode(config: RunConfig) -> RunConfig:
    """Return the configuration with lockstep in place of a mode "auto"."""
    if config.context.mode == AUTO:
        return config.with_keys("context", mode="lockstep")
    return config


def _round_up(rows: int, unit: int) -> int:
    return -(-rows // unit) * unit


@dataclass(frozen=True)
class RankedWay:
    """A way that was compared, in figures: its planner, its degree (None: of dynamic plans), the rows of a slot, and
    the seconds of a step. `priced`: whether these are of a machine; else they only compare ways.
    """

    planner: str
    degree: int | None
    rows: int
    seconds: float
    priced: bool = True

    @property
    def text(self) -> str:
        return f"degree {self.degree}" if self.planner in ONE_DEGREE else self.planner


@dataclass(frozen=True)
class Fit:
    """A way with the plans of its timed steps, the plan of memory for all of its steps, and the mean seconds of a step.

    If the way does not fit, `memory` is the leanest plan, `seconds` are None, and `refusal` says why. `memory` is None
    if the bytes of a rank are not known.
    """

    way: Way
    plans: tuple[Plan, ...]
    memory: MemoryPlan | None
    seconds: float | None
    refusal: str = ""

    @property
    def layout(self) -> tuple[str, int | None, int]:
        """The planner, its degree (None: of dynamic plans), and how many slots share experts."""
        choice = self.way.choice
        return choice.planner, choice.degree if choice.has_one_degree else None, self.way.facts.home.ep

    @property
    def ranked_way(self) -> RankedWay:
        """This fit in figures, as a comparison shows it; 0 seconds if it does not fit."""
        planner, degree, _ = self.layout
        rows = self.way.config.context.max_tokens_per_slot
        priced = bool(self.way.choice.options.cost.source)
        return RankedWay(planner, degree, rows if isinstance(rows, int) else 0, self.seconds or 0.0, priced=priced)

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for weights on the host and one for a ring, where these were chosen because nothing better fits."""
        budget = self.way.facts.budget
        choices = {
            "weights wait on the host (train.offload_weights), for nothing that costs less": bool(
                self.memory and self.memory.offload_weights and not self.way.config.train.offload_weights
            ),
            'attention goes round a ring (context.cp_comm_type = "p2p"), for no faster type': self.way.is_ring,
        }
        if budget is None:
            return ()
        place = gib_text(budget.device)
        notes = tuple(f"memory: {text} fits {place} of a GPU" for text, holds in choices.items() if holds)
        return (*notes, *self._teacher_notes())

    def _teacher_notes(self) -> Iterator[str]:
        teacher = self.way.facts.teacher
        if teacher is None:
            return
        counted = teacher.on(self.way.facts.home, self.way.memory_settings)
        size = sum(counted.weights(on_host=teacher.offload_weights))
        place = "of the host" if teacher.offload_weights else "of each GPU"
        yield f"memory: the teacher's weights ({teacher.frozen}) take {gib_text(size)} {place}; figures have them"

    @property
    def rank(self) -> tuple[bool, float, int]:
        """What fits are sorted by, the least first: whether it does not fit; its seconds, where dynamic plans count as
        somewhat slower (`PlannerConfig.least_gain`), or, of one that does not fit, its bytes; and its rows.
        """
        rows = self.ranked_way.rows
        if self.seconds is None:
            assert self.memory is not None
            return True, float(self.memory.device.total), rows
        return False, self.seconds * self.way.choice.least_gain, rows


def prefix_tree_notes(config: RunConfig, fit: Fit) -> Iterator[str]:
    """Yield a line where `config` leaves the rows of a slot open and the plans of the fit share prefixes: these rows,
    chosen for them, limit prefix trees too.
    """
    way = fit.way
    home = way.facts.home
    rows = way.choice.options.rows
    most = way.choice.most_tree_rows(home)
    if config.context.max_tokens_per_slot == AUTO and rows and any(plan.parents is not None for plan in fit.plans):
        yield (
            f'context.max_tokens_per_slot "auto" is {rows:,} rows, chosen for steps that compute shared prefixes once: '
            f"a prefix tree has at most {most:,} (× degree {way.choice.widest_even_degree(home)}), a larger one is "
            "divided"
        )


def fit_way(way: Way, timed: Sequence[Plan], full: Sequence[Plan] = ()) -> Fit:
    """Choose the memory of a way for its plans: those that are `timed` give the seconds, and those in `full` only must
    fit. If nothing fits, the fit has the leanest memory, no seconds, and the reason.
    """
    budget = way.facts.budget
    if budget is None:
        return Fit(way, tuple(timed), None, way.step_seconds(timed, None))
    plans = [*timed, *(plan for plan in full if plan not in timed)]
    try:
        memory = way.choose_memory(plans, budget)
    except PlanError as error:
        # The plan that needs least does not fit either.
        leanest = next(leanest_plans(way.memory_needs(plans), way.fixed_memory))
        return Fit(way, tuple(timed), leanest, None, str(error))
    return Fit(way, tuple(timed), memory, way.step_seconds(timed, memory))


@dataclass(frozen=True)
class Ranking:
    """The best way of each planner, degree and degree of experts, the fastest first, and why others are impossible."""

    fits: tuple[Fit, ...]
    # Each pair is what was refused, as "fixed at cp 2", and why.
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def best(self) -> Fit:
        return self.fits[0]


def rank_ways(config: RunConfig, facts: Facts, given: BindingKeys | None = None) -> Ranking:
    """Find the best way of each planner, degree and degree of experts that comes into question (`given` says which do);
    those that do not fit are last. If none fits with the fastest type of each group, all are tried under a ring.

    Raises PlanError where nothing can be planned.
    """
    best = list[Fit]()
    refused = dict[str, str]()
    open_ways = [*_list_open_ways(config, facts, given or BindingKeys())]
    for way in chain(open_ways, (way.ring_way() for way in open_ways if way.has_ring)):
        if way.is_ring and any(fit.seconds is not None for fit in best if not fit.way.is_ring):
            break
        try:
            best.append(_best_fit_of_open_way(way))
        except (PlanError, LayoutError) as error:
            refused[way.choice.text] = str(error)
    # If a ring fits, nothing else did.
    if any(fit.way.is_ring and fit.seconds is not None for fit in best):
        best = [fit for fit in best if fit.way.is_ring]
    if not best:
        raise PlanError([*refused.values(), "there is no layout to plan with"][0])
    planned = {fit.way.choice.text for fit in best}
    others = tuple((text, reason) for text, reason in refused.items() if text not in planned)
    return Ranking(tuple(sorted(best, key=lambda fit: fit.rank)), others)


def leanest_fit(config: RunConfig, facts: Facts) -> Fit:
    """Fit the heaviest steps to the way that needs least memory: a document over the most slots, and fewest rows, in a
    ring. Fixed plans come before dynamic ones of the same degree, which may spread a document over fewer slots.
    """
    open_ways = _list_open_ways(set_default_mode(config), facts, BindingKeys())
    way = max(open_ways, key=lambda way: (way.choice.widest_degree(facts.home) or 0, way.choice.has_one_degree))
    if way.config.context.max_tokens_per_slot == AUTO:
        way = way.with_context(max_tokens_per_slot=way.limits_of_rows()[0])
    # A ring holds less than exchanged heads or gathered keys.
    if way.has_ring:
        way = way.ring_way()
    return fit_way(way, way.plan_steps(facts.heaviest_steps))


def _best_fit_of_open_way(open_way: Way) -> Fit:
    """The fastest rows of a slot, by the heaviest steps, with which all steps fit (else the leanest fit), in free
    mode where the key leaves that open and it is faster."""
    context = open_way.config.context
    facts = open_way.facts
    open_way.choice.check_fits(facts.longest_document, facts.home)
    in_lockstep = replace(open_way, config=set_default_mode(open_way.config))
    rows_open = context.max_tokens_per_slot == AUTO
    ways = _sort_by_rows(in_lockstep) if rows_open else [in_lockstep]
    tried = list[Fit]()
    for way in ways:
        tried.append(_fit_whole_run(way, rows_open=rows_open))
        if tried[-1].seconds is not None:
            break
    fit = min(tried, key=lambda fit: fit.rank)
    parallel = open_way.config.parallel
    can_be_free = facts.gpu and facts.home.slots > 1 and parallel.pp == parallel.ep == 1
    can_be_free = can_be_free and not open_way.config.teacher.offload_weights
    if context.mode != AUTO or fit.seconds is None or not can_be_free:
        return fit
    free = _fit_whole_run(fit.way.with_context(mode="free"), rows_open=rows_open)
    return min(fit, free, key=lambda fit: fit.rank)


def _sort_by_rows(way: Way) -> list[Way]:
    """The best under the heaviest steps first. If the bytes of a rank are not known, one limit alone: on GPUs the
    highest, elsewhere the lowest."""
    facts = way.facts
    ways = [way.with_context(max_tokens_per_slot=rows) for rows in way.limits_of_rows()]
    if facts.budget is None:
        # On GPUs the warm-up halves rows for which memory is too short.
        return ways[-1:] if facts.gpu else ways[:1]
    fits = list[Fit]()
    refusal = None
    for way in ways:
        try:
            fits.append(fit_way(way, way.plan_steps(facts.heaviest_steps), way.fullest_plans(rows_open=True)))
        except PlanError as error:
            refusal = refusal or error
    if refusal and not fits:
        raise refusal
    return [fit.way for fit in sorted(fits, key=lambda fit: fit.rank)]


def _fit_whole_run(way: Way, *, rows_open: bool) -> Fit:
    """The memory holds the fullest steps, and the seconds are those of the timed ones."""
    full = [] if way.facts.budget is None else way.fullest_plans(rows_open=rows_open)
    return fit_way(way, way.plan_steps(way.facts.timed_steps), full)


def degrees_to_compare(home: Layout, choice: PlannerConfig) -> tuple[int, ...]:
    """List the degrees 1, 2, 4, … and the number of all slots, but for those that do not divide the slots or that the
    choice's query heads do not allow.
    """
    powers = {2**i for i in range(home.slots.bit_length())} | {home.slots}
    divisors = (degree for degree in sorted(powers) if home.slots % degree == 0)
    return tuple(degree for degree in divisors if choice.options.allows(degree, home.tp))


def expand_auto_choice(choice: PlannerConfig, home: Layout, lengths_differ: bool) -> Iterator[PlannerConfig]:
    """Yield what a planner "auto" and an open degree may become; a choice that has both as it is.

    Planner "auto" becomes dynamic or fixed, with any degree: one that is given does not count. Documents of one length,
    for which `lengths_differ` is false, gain nothing by dynamic plans. Degrees are those of `degrees_to_compare`.
    """
    degree = choice.degree
    planners = [choice.planner]
    if choice.planner == AUTO:
        degree = None
        planners = ["dynamic", "fixed"] if lengths_differ and home.slots > 1 else ["fixed"]
    for one in (replace(choice, planner=planner, degree=degree) for planner in planners):
        if degree or not one.has_one_degree:
            yield one
            continue
        for cp in degrees_to_compare(home, one):
            yield replace(one, degree=cp, options=options_at_degree(one.options, cp))


def _list_open_ways(config: RunConfig, facts: Facts, given: BindingKeys) -> Iterator[Way]:
    """Rows and mode are still open."""
    context = config.context
    planners = [context.planner]
    # A planner of one's own is among them.
    if not given.planner:
        planners = ["dynamic", "fixed", "padded"]
        if context.planner not in (AUTO, *planners):
            planners.append(context.planner)
    for home_config, home in _homes_with_expert_degrees(config, facts, given):
        way = Way(home_config, replace(facts, home=home))
        for planner in planners:
            for choice in expand_auto_choice(replace(way.choice, planner=planner), home, facts.lengths_differ):
                yield way.with_context(
                    planner=choice.planner,
                    context_parallel_size=choice.degree or 0,
                    hierarchical_context_parallel_sizes=choice.options.hierarchical_context_parallel_sizes or 0,
                )


def fastest_plan(
    choice: PlannerConfig,
    lengths: Sequence[int],
    home: Layout,
    *,
    targets: int | None = None,
    parents: Sequence[int] | None = None,
) -> Plan:
    """Plan documents by the fastest planner and degree of those that a choice leaves open. Raises PlanError if none can
    plan them.
    """
    plans = list[tuple[float, Plan]]()
    refusal = None
    for one in expand_auto_choice(choice, home, len(set(lengths)) > 1):
        try:
            plan = one.plan(lengths, home, targets=targets, parents=parents)
        except PlanError as error:
            refusal = error
        else:
            plans.append((plan.predicted_seconds * one.least_gain, plan))
    if refusal and not plans:
        raise refusal
    return min(plans, key=itemgetter(0))[1]


def _homes_with_expert_degrees(
    config: RunConfig, facts: Facts, given: BindingKeys
) -> Iterator[tuple[RunConfig, Layout]]:
    """As they are, and, if the degree of experts is open, a home whose slots share experts: as many slots as divide
    both the slots and the experts, at most MOST_EP."""
    yield config, facts.home
    if given.ep or not facts.expert_count or config.context.mode == "free":
        return
    copy_slots = facts.home.slots // facts.home.dp_replicate
    ep = max(d for d in range(1, MOST_EP + 1) if copy_slots % d == 0 and facts.expert_count % d == 0)
    if ep == 1:
        return
    changed = config.with_keys("parallel", ep=ep)
    with suppress(LongspanError):  # a degree that does not suit the others
        yield changed, home_of(changed.parallel, len(facts.home.ranks))


# ---- the longest document that fits


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
    """(tokens, 0: none; the way at their rows). Plans are fixed ones, at the degree that the way gives or over all
    slots. The budget must be known."""
    facts = way.facts
    home = facts.home
    budget = facts.budget
    assert budget is not None
    degree = (way.choice.degree if way.choice.has_one_degree else None) or home.slots
    multiple = 2 * way.choice.options.row_multiple
    unit = -(-UNIT // multiple) * multiple
    way = way.with_context(planner="fixed", context_parallel_size=degree, max_tokens_per_slot=0)
    short = way.choice.plan((unit * degree,), home)

    def resize_short_plan(units: int) -> Plan:
        """Change the plan of the short document to one of so many units a slot."""
        (group,) = short.micro_batches[0].groups
        # Another length may get another type.
        if way.choice.options.cp_comm_type == AUTO:
            group = replace(group, cp_comm_type=AUTO, hierarchical_context_parallel_sizes=None)
        tokens = units * unit * degree
        group = replace(group, lengths=(tokens,), pad_to=None)
        return replace(short, lengths=(tokens,), micro_batches=(MicroBatch((group,)), *short.micro_batches[1:]))

    def fits(plan: Plan) -> bool:
        return any_choice_fits(way.memory_needs([plan]), budget, way.fixed_memory)

    # The number of units doubles until one does not fit; halving finds the last below that one.
    most = 0
    too_many = 1
    while too_many < MOST_ROWS // unit and fits(resize_short_plan(too_many)):
        most = too_many
        too_many *= 2
    while most + 1 < too_many:
        middle = (most + too_many) // 2
        if fits(resize_short_plan(middle)):
            most = middle
        else:
            too_many = middle
    # the plan that is made for that length may share attention in another way, and need more
    while most and not fits(way.choice.plan((most * unit * degree,), home)):
        most = max(0, most - 1 - most // 256)
    return most * unit * degree, way.with_context(max_tokens_per_slot=max(1, most) * unit)

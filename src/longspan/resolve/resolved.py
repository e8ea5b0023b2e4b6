"""`resolve`: what a configuration leaves open ("auto", and a degree 0) is decided here, once for every caller.

First the partition of a hybrid's rows, then planner, degree, rows of a slot, mode and memory (`ways.py`), then the
degrees of evaluations. Evaluations with "auto" have training's planner and rows.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from longspan.config.keys import AUTO
from longspan.config.plan_section import ONE_DEGREE, EvalConfig
from longspan.config.sections import RunConfig, with_evaluations
from longspan.errors import ConfigError, PlanError, plural
from longspan.layout import Layout
from longspan.plan import Cost, MemoryPlan
from longspan.plan.memory.model_numbers import ModelNumbers
from longspan.resolve.evaluation import compare_degrees
from longspan.resolve.facts import Facts
from longspan.resolve.partition import choose_partition
from longspan.resolve.planner_config import PlannerConfig
from longspan.resolve.ways import (
    BindingKeys,
    RankedWay,
    Ranking,
    Way,
    prefix_tree_notes,
    rank_ways,
    set_default_mode,
    with_node_size_of_machine,
)

# A reason names so many other ways.
NAMED = 3


@dataclass(frozen=True)
class Reasons:
    """Why the choices are as they are: ways with their numbers, and lines for people."""

    ways: tuple[RankedWay, ...] = ()  # the fastest first; empty where planner and degree were given
    # Hybrids alone have a partition to choose.
    partition: str = ""
    degrees: tuple[str, ...] = ()  # a line for each evaluation set whose degree was chosen
    # A note says what is unusual about prices.
    notes: tuple[str, ...] = ()

    @property
    def planner(self) -> str:
        """Why the first of the ways is taken, in one sentence; "" without any."""
        if not self.ways:
            return ""
        best, *others = self.ways
        words = f"{best.planner}, {best.text}" if best.planner in ONE_DEGREE else best.planner
        if not others:
            return f"{words}, which alone is possible"
        seconds = f"{best.seconds:.3g} s a step, " if best.priced else ""
        texts = [f"{_speed_text(other.seconds / best.seconds)} {other.text}" for other in others[:NAMED]]
        return f"{words} (predicted {seconds}{', '.join(texts)})"

    def to_json(self) -> dict[str, Any]:
        """Return the reasons as records have them: the degree of dynamic plans is 0."""
        ways = [asdict(way) | {"degree": way.degree or 0} for way in self.ways]
        return asdict(self) | {"ways": ways, "planner": self.planner}


def _speed_text(times: float) -> str:
    percent = 100 * (times - 1)
    if abs(percent) < 0.5:
        return "as fast as"
    if times >= 1.5:
        return f"{times:.1f} times as fast as"
    return f"{abs(percent):.0f} % {'faster' if percent > 0 else 'slower'} than"


@dataclass(frozen=True)
class Resolved:
    """A configuration that leaves nothing open, its plan of memory (None: none is made), and the price of plans."""

    config: RunConfig
    memory: MemoryPlan | None
    cost: Cost
    reasons: Reasons = field(default_factory=Reasons)
    # A run's folder keeps the rows of a slot, which this line says.
    rows_line: str = ""
    ranking: Ranking | None = None
    """The ways that were compared, with their plans (None: nothing was open). It cannot be sent to another process."""


class NothingFitsError(PlanError):
    """No way fits; `ranking` has those that were compared, of each planner and degree the leanest."""

    def __init__(self, ranking: Ranking, partition: str) -> None:
        super().__init__(ranking.best.refusal)
        self.ranking = ranking
        self.partition = partition


def resolve(config: RunConfig, facts: Facts, given: BindingKeys | None = None) -> Resolved:
    """Decide what a configuration leaves open: planner, degree, type, rows of a slot, mode, and what memory holds.

    >>> resolve(config, Facts(home=Layout(8), machine=machine, model=model, lengths_of_step=lengths, steps=100)).config

    `given` says which keys hold (None: those of training). The same arguments give the same result. Call it on one
    rank, and send the others its result, as hosts may round times differently. Raises NothingFitsError, with the bytes,
    where nothing fits, PlanError where nothing can be planned, and ConfigError where no degree is possible.
    """
    config, partition = choose_partition(config, facts)
    unplanned = tuple[str, ...]()
    if facts.budget is not None:
        try:
            settings = Way(config, facts).memory_settings
            ModelNumbers.from_configuration(facts.model, facts.home, settings)
            if settings.teacher is not None:
                settings.teacher.on(facts.home, settings)
        except PlanError as error:  # the model's bytes cannot be counted
            unplanned = (f"memory: not planned, and the keys of [train] hold as they are: {error}",)
            facts = replace(facts, budget=None)
    rows_are_open = config.context.max_tokens_per_slot == AUTO
    if leaves_plans_open(config) or rows_are_open or facts.budget is not None:
        ranking = rank_ways(config, facts, given)
        if ranking.best.seconds is None:
            raise NothingFitsError(ranking, partition)
        resolved = _resolve_by_best_way(config, ranking)
    else:
        notes = list[str]()
        way = Way(set_default_mode(config), facts)
        resolved = Resolved(way.config, None, way.cost(notes=notes), Reasons(notes=tuple(notes)))
    notes = (*unplanned, *resolved.reasons.notes)
    reasons = replace(resolved.reasons, partition=partition, notes=notes)
    return resolve_evaluations(replace(resolved, reasons=reasons), facts)


def leaves_plans_open(config: RunConfig) -> bool:
    """Return whether the keys leave the planner of training, or its one degree, to be chosen."""
    context = config.context
    return context.planner == AUTO or (context.planner in ONE_DEGREE and not context.context_parallel_size)


def _resolve_by_best_way(config: RunConfig, ranking: Ranking) -> Resolved:
    best = ranking.best
    chosen = set_default_mode(best.way.config)
    choice = best.way.choice
    notes = [*best.notes, *prefix_tree_notes(config, best)]
    if config.context.planner == AUTO and not choice.has_one_degree:
        chosen = chosen.with_keys("context", context_parallel_size=1)  # a degree that was given does not count
    chosen = set_evaluation_rows(chosen, chosen.context.max_tokens_per_slot)
    ways = ()
    if leaves_plans_open(config) and best.way.facts.home.slots > 1:
        ways = tuple(fit.ranked_way for fit in ranking.fits if fit.seconds is not None)
    context = chosen.context

    def give_training_plans(entry: EvalConfig) -> EvalConfig:
        """Give training's planner to an evaluation with "auto", and its degree to a padded one without a degree: only
        degrees of fixed plans are compared later.
        """
        if entry.planner == AUTO:
            return replace(entry, planner=context.planner)
        if entry.planner == "padded" and not entry.context_parallel_size:
            return replace(entry, context_parallel_size=context.context_parallel_size)
        return entry

    chosen = with_evaluations(chosen, map(give_training_plans, chosen.evaluations))
    cost = best.way.cost(best.memory, notes)
    return Resolved(chosen, best.memory, cost, Reasons(ways=ways, notes=tuple(notes)), ranking=ranking)


def set_evaluation_rows(config: RunConfig, rows: int | str) -> RunConfig:
    """Return the configuration with these rows of a slot in place of "auto" of evaluations, which keep less of a row
    than training.
    """
    if config.evaluation.max_tokens_per_slot == AUTO:
        config = config.with_keys("evaluation", max_tokens_per_slot=rows)
    sets = (
        replace(s, max_tokens_per_slot=rows) if s.max_tokens_per_slot == AUTO else s for s in config.evaluation.sets
    )
    return config.with_sets(sets)


def resolve_evaluations(resolved: Resolved, facts: Facts) -> Resolved:
    """Return `resolved` with degree, type and levels chosen for every evaluation set whose degree is open, and with the
    reasons.
    """
    if not any(entry.context_parallel_size in (0, AUTO) for entry in resolved.config.evaluations):
        return resolved
    config = with_node_size_of_machine(resolved.config, facts)
    entries = list[EvalConfig]()
    lines = list[str]()
    for entry in resolved.config.evaluations:
        choice = PlannerConfig.evaluation(config, entry, cost=resolved.cost, heads=facts.heads)
        lengths = [int(n) for n in facts.evaluated.get(entry.name, ())]
        choice, line = choose_evaluation_degree(choice, lengths, facts.home, name=entry.name)
        if line:
            lines.append(line)
            types = choice.options.cp_comm_type
            sizes = choice.options.hierarchical_context_parallel_sizes
            entry = replace(
                entry,
                context_parallel_size=choice.degree or 0,
                cp_comm_type=types if isinstance(types, str) else tuple(types),
                hierarchical_context_parallel_sizes=tuple(sizes) if isinstance(sizes, Sequence) else sizes or 0,
            )
        entries.append(entry)
    reasons = replace(resolved.reasons, degrees=tuple(lines))
    return replace(resolved, config=with_evaluations(resolved.config, entries), reasons=reasons)


def choose_evaluation_degree(
    choice: PlannerConfig, lengths: Sequence[int], home: Layout, *, name: str = "", planner_open: bool = False
) -> tuple[PlannerConfig, str]:
    """Choose the fastest degree for these documents, of evaluation set `name`; returns the choice, and why in a line.

    A communication type "auto" becomes the fastest one. A choice that has a degree stays as it is, with the reason "",
    and so does one without documents. With `planner_open` the planner is chosen too: the choice, a dynamic one, stays
    where dynamic plans are faster than all degrees, and else becomes fixed. Raises ConfigError if no degree is
    possible.
    """
    is_open = planner_open or (choice.has_one_degree and not choice.degree)
    if not is_open or not len(lengths):
        return choice, ""
    try:
        dynamic = choice.min_degree, choice.max_degree
        comparison = compare_degrees(lengths, home, options=choice.home_options(home), dynamic_degrees=dynamic)
    except PlanError as error:
        ranks = plural(len(home.ranks), "rank")
        raise ConfigError(f'{choice.degree_key} is "auto" on {ranks}: {error}') from error
    best = comparison.best
    mixed = comparison.dynamic
    if planner_open and mixed and mixed.predicted_seconds * choice.least_gain < best.planned.predicted_seconds:
        return choice, f"dynamic plans are faster than one degree: {comparison.reason(name)}"
    options = replace(
        choice.options,
        cp_comm_type=best.options.cp_comm_type,
        hierarchical_context_parallel_sizes=best.options.hierarchical_context_parallel_sizes,
    )
    planner = "fixed" if planner_open else choice.planner
    return replace(choice, planner=planner, degree=best.cp, options=options), comparison.reason(name)

"""A degree "auto" of an evaluation: chosen by its cost once the documents are known, with the reason in one line.

The choice is that of `longspan plan --compare --which-eval-degree` (`plan/ways.py`): forward passes of
these documents at every degree and, if the type is "auto" too, under every communication type, through the pipeline's
stages, within the limit of rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig, set_evaluations
from longspan.errors import ConfigError, PlanError, plural
from longspan.layout import Layout
from longspan.plan import Cost
from longspan.plan.ways import which_degree
from longspan.train.plans import PlanChoice


def choose_degree(
    choice: PlanChoice, lengths: Sequence[int], home: Layout, *, name: str = ""
) -> tuple[PlanChoice, str]:
    """Choose the fastest degree for these documents, and say why.

    >>> choice, reason = choose_degree(PlanChoice.evaluation(config), lengths, home)  # doctest: +SKIP
    >>> print(reason)  # doctest: +SKIP
    evaluation at cp 4, a2a: 32 documents in 0.21 s predicted; cp 1 0.53 s, cp 2 0.31 s; dynamic plan 0.2 s

    A communication type "auto" becomes the fastest one. A choice that has a degree stays, with the reason ""; so does
    any choice where there are no documents to compare degrees by. `name` is that of the evaluation set. Raises
    ConfigError if no degree is possible.
    """
    if choice.degree or not len(lengths):
        return choice, ""
    try:
        dynamic = choice.min_degree, choice.max_degree
        comparison = which_degree(lengths, home, options=choice.home_options(home), dynamic_degrees=dynamic)
    except PlanError as error:
        ranks = plural(len(home.ranks), "rank")
        raise ConfigError(f'{choice.degree_key} is "auto" on {ranks}: {error}') from error
    best = comparison.best
    options = replace(
        choice.options,
        cp_comm_type=best.options.cp_comm_type,
        hierarchical_context_parallel_sizes=best.options.hierarchical_context_parallel_sizes,
    )
    return replace(choice, degree=best.cp, options=options), comparison.reason(name)


def choose_degree_on_ranks(
    choice: PlanChoice, lengths: Sequence[int], world: World, log: LogLine, *, name: str = ""
) -> tuple[PlanChoice, str]:
    """Choose on the first rank as `choose_degree` does, for every rank, and log why; all ranks call it together.

    Hosts may round times differently, and would then evaluate at different degrees.
    """
    if choice.degree:
        return choice, ""
    work = partial(choose_degree, choice, [int(n) for n in lengths], world.home, name=name)
    choice, reason = run_on_first_rank(world, work, ConfigError)
    if reason:
        log(reason)
    return choice, reason


def choose_degrees(
    config: RunConfig,
    lengths: Mapping[str, Sequence[int]],
    world: World,
    log: LogLine,
    *,
    cost: Cost,
    heads: int | None,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Choose degree, type and levels for every evaluation set whose degree is "auto"; all ranks call it together.

    Returns the configuration with these values, and a line with the reason for each such set. `lengths` has the tokens
    of each document, by the name of its evaluation set ("": the held-out documents); `heads` is the number of the
    model's query heads, None if not known.
    """
    entries, reasons = list[EvalConfig](), list[str]()
    for entry in config.evaluations:
        choice = PlanChoice.evaluation(config, entry, cost=cost, heads=heads)
        set_lengths = lengths.get(entry.name, ())
        choice, reason = choose_degree_on_ranks(choice, set_lengths, world, log, name=entry.name)
        entries.append(_set_choice(entry, choice) if reason else entry)
        reasons += [reason] if reason else []
    return set_evaluations(config, entries), tuple(reasons)


def _set_choice(entry: EvalConfig, choice: PlanChoice) -> EvalConfig:
    types, sizes = choice.options.cp_comm_type, choice.options.hierarchical_context_parallel_sizes
    return replace(
        entry,
        context_parallel_size=choice.degree,
        cp_comm_type=types if isinstance(types, str) else tuple(types),
        hierarchical_context_parallel_sizes=tuple(sizes) if isinstance(sizes, Sequence) else sizes or 0,
    )

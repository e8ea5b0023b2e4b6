"""The layout of a saved run fitted to the ranks that evaluate it. No torch here.

What the user gives by flag is never changed: `check_config` refuses it if it does not fit.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from longspan.config.keys import AUTO, key_values, with_key_values
from longspan.config.plan_section import ONE_DEGREE, EvaluationPlan
from longspan.config.sections import RunConfig
from longspan.errors import plural
from longspan.layout import Layout
from longspan.plan.check import heads_allow_degree
from longspan.plan.micro_batch import fit_level_sizes
from longspan.resolve.planner_config import PlannerConfig, default_rows, plan_row_multiple

HOME = ("tp", "pp", "dp_replicate", "ep")  # the degrees of [parallel]


class Change(NamedTuple):
    """A key that has another value than the run had."""

    key: str
    before: Any
    now: Any


def take_plans_of_run(config: RunConfig, chosen: RunConfig, *, same_ranks: bool) -> RunConfig:
    """Return a run's configuration in which open keys of evaluation have the values that the run had `chosen`.

    Rows of a slot hold on any ranks; planner, degree, type, levels and partition only on as many as the run had.
    """
    keys = {"max_tokens_per_slot"}
    if same_ranks:
        keys |= config.evaluation.plan_keys.keys()
        if config.context.partition == AUTO:
            config = config.with_keys("context", partition=chosen.context.partition)
    open_keys = {key for key in keys if config.evaluation.plan_keys[key] in (AUTO, 0)}
    values = {key: value for key, value in chosen.evaluation.plan_keys.items() if key in open_keys}
    return config.with_keys("evaluation", **values)


def fit_home_to_ranks(config: RunConfig, ranks: int, flag_keys: Collection[str]) -> RunConfig:
    """Fit the configuration to a number of ranks: each degree that is not of `flag_keys` becomes one that fits.

    >>> fit_home_to_ranks(replace(RunConfig(), parallel=ParallelConfig(tp=4, pp=2)), 6, ()).parallel.tp
    2

    A degree that fits is the greatest common divisor of the run's and of what the degrees before it leave of the ranks.
    Degrees of flags come first and stay, and `check_config` refuses those that do not fit.
    """
    values = dict[str, Any]()
    room = ranks
    for name in sorted((f"parallel.{key}" for key in HOME), key=lambda name: name not in flag_keys):
        degree = getattr(config.parallel, name.partition(".")[2])
        values[name] = degree if name in flag_keys else math.gcd(degree, room)
        room = max(1, room // values[name])
    if values["parallel.pp"] == 1:
        values |= {"parallel.vpp": 1, "parallel.pipeline_schedule": "1f1b"}
    if values["parallel.tp"] == 1:
        values["parallel.sequence_parallel"] = False
    slots = max(1, ranks // (values["parallel.tp"] * values["parallel.pp"]))
    least = min(config.context.min_dynamic_context_parallel_size, slots)  # evaluation's is the same
    values |= {f"{section}.min_dynamic_context_parallel_size": least for section in ("context", "evaluation")}
    values["context.node_size"] = AUTO
    values["encoder.tp"] = math.gcd(config.encoder.tp, ranks)
    for name in values.keys() - flag_keys:
        section, _, key = name.partition(".")
        config = replace(config, **{section: with_key_values(getattr(config, section), {key: values[name]})})
    return config


def fit_evaluation_plans(
    config: RunConfig, home: Layout, heads: int | None, longest: int, flag_keys: Collection[str]
) -> RunConfig:
    """Fit the plans of evaluation to this home: nearest degree, sizes of its levels, a cap that holds `longest` tokens.

    The degree is the largest that divides the slots, that a2a can deal the heads to, and that is no larger than the
    run's. An "auto" degree is chosen later. A max_tokens_per_slot "auto" becomes `default_rows`; a number becomes more
    if the document needs it. Keys of `flag_keys` stay, but for a cap of "auto".
    """
    section = config.evaluation
    choice = PlannerConfig.evaluation(config)
    values = dict[str, Any]()
    types = choice.options.types
    degree = choice.widest_degree(home) or 1
    divisors = (divisor for divisor in range(1, home.slots + 1) if home.slots % divisor == 0)
    degrees = [divisor for divisor in divisors if heads_allow_degree(divisor, heads, types, home.tp)]
    if section.context_parallel_size == AUTO or (section.planner == "fixed" and not section.context_parallel_size):
        degree = degrees[-1]  # chosen later: the largest one allows the longest documents
    elif section.planner in ONE_DEGREE:
        if "evaluation.context_parallel_size" not in flag_keys:
            degree = max((divisor for divisor in degrees if divisor <= degree), default=1)
        values["context_parallel_size"] = degree
        sizes = section.hierarchical_context_parallel_sizes
        if "a2a+p2p" in types and not isinstance(sizes, int) and math.prod(sizes) != degree:
            values["hierarchical_context_parallel_sizes"] = fit_level_sizes(sizes, degree)
    multiple = plan_row_multiple(config.parallel)
    cap = section.max_tokens_per_slot
    rows = -(-longest // degree // multiple) * multiple
    if not isinstance(cap, str) and 0 < cap < rows:
        values["max_tokens_per_slot"] = rows
    values = {key: value for key, value in values.items() if f"evaluation.{key}" not in flag_keys}
    if cap == AUTO:  # also where a flag says so
        values["max_tokens_per_slot"] = default_rows(rows)
    return config.with_keys("evaluation", **values)


def layout_changes(before: RunConfig, now: RunConfig) -> tuple[Change, ...]:
    """List the keys of the layout that have another value now; one that was "auto" is none."""
    old = before.tables()
    new = now.tables()
    keys = {section: new[section] for section in ("parallel", "context", "encoder")}
    keys["evaluation"] = key_values(EvaluationPlan(**now.evaluation.plan_keys))
    names = ((section, key) for section in keys for key in keys[section])
    changes = (Change(f"{section}.{key}", old[section][key], new[section][key]) for section, key in names)
    return tuple(change for change in changes if change.before not in (change.now, AUTO))


def changes_line(changes: Sequence[Change], ranks: int) -> str:
    """Write the changes to the run's layout in one line; empty if there are none."""
    texts = (f"{key} {before} -> {now}" for key, before, now in changes)
    return f"on {plural(ranks, 'rank')}: {'; '.join(texts)}" if changes else ""

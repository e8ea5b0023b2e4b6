"""A run's layout on other ranks than it was trained on: the nearest degrees that fit, and the keys that change.

What the user gives by flag is never changed: `check_config` refuses it if it does not fit. No torch here.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspan.config.keys import AUTO
from longspan.config.plan_section import ONE_DEGREE, ContextConfig, EvalConfig, PlanSection, take_keys
from longspan.config.sections import ParallelConfig, RunConfig, set_evaluations
from longspan.errors import ConfigError, plural
from longspan.layout import Layout
from longspan.plan.check import heads_allow
from longspan.plan.hierarchy import level_sizes
from longspan.train.plans import PlanChoice, plan_row_multiple

ROWS = 8192  # of a slot in a micro-batch, if neither a flag nor a run has a number


@dataclass(frozen=True)
class Change:
    """A key that has another value than the run had, and why."""

    key: str
    before: Any
    now: Any
    why: str

    def __str__(self) -> str:
        """Write the change as messages have it: "parallel.tp 4 -> 2 (6 ranks)"."""
        return f"{self.key} {_value_text(self.before)} -> {_value_text(self.now)} ({self.why})"


class _FittedSection:
    """A section whose values change, except those of `flag_keys`; `prefix` begins the names of its keys."""

    def __init__(self, section: Any, prefix: str, flag_keys: Collection[str]) -> None:
        """Take a section without changes; `flag_keys` have no prefix."""
        self.section, self.flag_keys, self._prefix = section, flag_keys, prefix
        self.changes: list[Change] = []

    def change_key(self, key: str, now: Any, why: str) -> None:
        """Change a key of the section and note why, unless a flag sets it or it has that value already."""
        old = getattr(self.section, key)
        if now != old and key not in self.flag_keys:
            self.section = replace(self.section, **{key: now})
            self.changes.append(Change(self._prefix + key, old, now, why))


def fit_home(config: RunConfig, ranks: int, flag_keys: Collection[str]) -> tuple[RunConfig, tuple[Change, ...]]:
    """Fit the configuration to a number of ranks: a degree that is not of `flag_keys` becomes one that fits.

    >>> fit_home(replace(RunConfig(), parallel=ParallelConfig(tp=4, pp=2)), 6, ())[0].parallel.tp
    2

    tp x pp is the largest product of divisors of the run's degrees that divides the ranks.
    """
    home = _FittedSection(config.parallel, "parallel.", _strip_prefix("parallel.", flag_keys))
    tp, pp = _choose_tp_and_pp(config.parallel, ranks, flag_keys)
    home.change_key("tp", tp, f"{plural(ranks, 'rank')}")
    home.change_key("pp", pp, f"{plural(ranks, 'rank')}")
    if home.section.pp == 1:
        home.change_key("vpp", 1, "no pipeline")
        home.change_key("pipeline_schedule", "1f1b", "no pipeline")
    if home.section.tp == 1:
        home.change_key("sequence_parallel", False, "tp 1")
    slots, remainder = divmod(ranks, home.section.tp * home.section.pp)
    if not remainder:  # else `check_config` refuses the degrees
        _fit_slots(home, slots)
    encoder = _FittedSection(config.encoder, "encoder.", _strip_prefix("encoder.", flag_keys))
    degrees = [tp for tp in _divisors(config.encoder.tp) if ranks % tp == 0]  # which share its heads evenly
    encoder.change_key("tp", degrees[-1], f"{plural(ranks, 'rank')}")
    config = replace(config, parallel=home.section, encoder=encoder.section)
    return config, (*home.changes, *encoder.changes)


def _fit_slots(home: _FittedSection, slots: int) -> None:
    """Change dp_replicate, the copies of the weights, to divide the slots, and ep to divide the slots of each copy."""
    parallel: ParallelConfig = home.section
    home.change_key("dp_replicate", _nearest_below(parallel.dp_replicate, _divisors(slots)), plural(slots, "slot"))
    width, remainder = divmod(slots, home.section.dp_replicate)
    if not remainder:  # else `check_config` refuses the dp_replicate of a flag
        degrees = [ep for ep in _divisors(width) if parallel.ep % ep == 0]  # which share experts evenly
        home.change_key(
            "ep", _nearest_below(parallel.ep, degrees), f"{plural(width, 'slot')} of each copy of the weights"
        )


def _choose_tp_and_pp(parallel: ParallelConfig, ranks: int, flag_keys: Collection[str]) -> tuple[int, int]:
    """Choose tp and pp, divisors of the run's, with the largest product that divides the ranks; flags fix them.

    Of equal products the one with the larger tp is chosen. Where none fits, the degrees stay and are refused later.
    """

    def list_degrees(key: str) -> list[int]:
        """List the degrees that a key may have: the divisors of the run's, or only that of a flag."""
        degree = getattr(parallel, key)
        return [degree] if f"parallel.{key}" in flag_keys else _divisors(degree)

    pairs = [(tp, pp) for tp in list_degrees("tp") for pp in list_degrees("pp") if ranks % (tp * pp) == 0]
    return max(pairs, key=lambda pair: (pair[0] * pair[1], pair[0]), default=(parallel.tp, parallel.pp))


def fit_node_size(
    config: RunConfig, node_size: int, flag_keys: Collection[str]
) -> tuple[RunConfig, tuple[Change, ...]]:
    """Replace the node size that the run had by this machine's; one that is "auto" or that a flag set stays."""
    context = _FittedSection(config.context, "context.", _strip_prefix("context.", flag_keys))
    if config.context.node_size != AUTO:
        context.change_key("node_size", node_size, f"hosts of {plural(node_size, 'slot')}")
    return replace(config, context=context.section), tuple(context.changes)


def fit_set(
    config: RunConfig, entry: EvalConfig, home: Layout, heads: int | None, longest: int, flag_keys: Collection[str]
) -> tuple[EvalConfig, tuple[Change, ...]]:
    """Fit the plan of a set to this home: nearest degree, sizes of its levels, a cap that holds `longest` tokens.

    A planner of one degree gets the largest that divides the slots, that a2a can deal the query heads to, and that is
    no larger than the run's, unless a flag gives the degree. A dynamic planner keeps its range, whose lower end is at
    most the slots. An "auto" degree is chosen later, under a cap that holds the document at the largest degree. Rows
    are rounded up to a multiple that plans need. A max_tokens_per_slot of "auto" becomes ROWS, or more if the document
    needs more, and does not count as a change. `heads` is None while the query heads are not known.
    """
    fit = _FittedSection(entry, entry.prefix, _strip_prefix("context.eval_", flag_keys))
    types, slots = PlanChoice.evaluation(config, entry).comm_types, plural(home.slots, "slot")
    degrees = [divisor for divisor in _divisors(home.slots) if heads_allow(divisor, heads, types, home.tp)]
    degree = PlanChoice.evaluation(config, entry).widest_degree(home)
    if isinstance(entry.context_parallel_size, str):  # "auto"
        degree = degrees[-1]
    elif entry.planner in ONE_DEGREE:
        old_degree, sizes = entry.context_parallel_size, entry.hierarchical_context_parallel_sizes
        # A degree that divides the slots is lowered for the heads only.
        reason = "" if home.slots % old_degree else f", {heads} query heads under a2a"
        degree = old_degree if "context_parallel_size" in fit.flag_keys else _nearest_below(old_degree, degrees)
        fit.change_key("context_parallel_size", degree, f"{slots}{reason}")
        if "a2a+p2p" in types and not isinstance(sizes, int) and math.prod(sizes) != degree:
            fit.change_key("hierarchical_context_parallel_sizes", level_sizes(sizes, degree), f"cp {degree}")
    elif entry.planner == "dynamic":
        least = entry.min_dynamic_context_parallel_size
        fit.change_key("min_dynamic_context_parallel_size", min(least, home.slots), slots)
    multiple = plan_row_multiple(config.parallel)
    rows, cap = -(-longest // degree // multiple) * multiple, entry.max_tokens_per_slot
    if cap == AUTO:
        return replace(fit.section, max_tokens_per_slot=max(rows, ROWS)), tuple(fit.changes)
    if not isinstance(cap, str) and 0 < cap < rows:
        fit.change_key("max_tokens_per_slot", rows, f"the longest document has {longest:,} tokens, at cp {degree}")
    return fit.section, tuple(fit.changes)


def find_set(config: RunConfig, name: str, flag_keys: Collection[str]) -> EvalConfig:
    """Find the plan of a set before it is fitted: a set [[eval]] of the run by its name, "" for the held-out documents.

    Raises ConfigError for a name that the run does not have.
    """
    for entry in config.evaluations:
        if entry.name == name:
            return _set_flags(entry, config.context, flag_keys)
    names = ", ".join(entry.name for entry in config.eval) or "none"
    raise ConfigError(f"--set is {name!r}, and the run's evaluation sets [[eval]] are: {names}")


def _set_flags(entry: EvalConfig, context: ContextConfig, flag_keys: Collection[str]) -> EvalConfig:
    """Return the section of a set with the values of those keys `context.eval_*` that flags set.

    As in a table [[eval]], a degree without a planner means plans of that degree; a degree 0 means that of training.
    """
    values, keys = context.evaluation.plan_keys, _strip_prefix("context.eval_", flag_keys)
    flags = {key: value for key, value in values.items() if key in keys}
    if flags.get("context_parallel_size") == 0:
        flags["context_parallel_size"] = context.context_parallel_size
    filled_keys = take_keys(PlanSection(**flags), entry).plan_keys
    return replace(entry, **filled_keys | flags)  # a flag that sets "" has been filled, and is put back


def fit_evaluations(config: RunConfig, names: Collection[str], home: Layout, flag_keys: Collection[str]) -> RunConfig:
    """Fit the configuration of these sets to this home, for `check_config`, before heads and documents are read.

    Each set is fitted again once heads and documents are known, for heads may ask for a lower degree and documents for
    more rows. Limits of document lengths are left out, as the documents to come may be shorter.
    """
    sets = (find_set(config, name, flag_keys) for name in ("", *names))
    fitting = (fit_set(config, entry, home, None, 1, flag_keys)[0] for entry in sets)
    config = set_evaluations(config, (replace(entry, max_document_tokens=0) for entry in fitting))
    return replace(config, data=replace(config.data, max_document_tokens=0))


def changes_line(changes: Sequence[Change], ranks: int) -> str:
    """Write the changes to the run's layout in one line; empty if there are none."""
    return f"on {plural(ranks, 'rank')}: {'; '.join(map(str, changes))}" if changes else ""


def _strip_prefix(prefix: str, flag_keys: Collection[str]) -> set[str]:
    """Return the keys that begin with a prefix, without the prefix."""
    return {key.removeprefix(prefix) for key in flag_keys if key.startswith(prefix)}


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def _nearest_below(degree: int, fitting: Iterable[int]) -> int:
    """Return the largest of the fitting degrees up to `degree`; 1 where there is none, as it always fits."""
    return max((candidate for candidate in fitting if candidate <= degree), default=1)


def _value_text(value: Any) -> str:
    """Return a value of a key as messages write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return f"{value:,}" if isinstance(value, int) else str(value)

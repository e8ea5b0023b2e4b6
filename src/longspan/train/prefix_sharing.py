"""Which documents of a step share prefixes where nobody said so: those for which it is exact, and faster; and the line
that says so.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.config.keys import AUTO
from longspan.data.shared_prefixes import cut_documents
from longspan.errors import plural
from longspan.layout import Layout
from longspan.model.seams.call_rules import call_rules
from longspan.plan import Plan
from longspan.plan.shape.model_shape import ModelShape, model_flops
from longspan.resolve.planner_config import PREFIX_PLANNERS, PlannerConfig, plan_prefix_trees

_log = logging.getLogger(__name__)
_LOGGED_SHARED = threading.Event()


def share_prefixes_where_faster(
    model: nn.Module,
    documents: Sequence[Any],
    lengths: tuple[int, ...],
    choice: PlannerConfig,
    world: World,
    *,
    training: bool,
    targets: int | None = None,
    plan: Callable[..., Plan] | None = None,
) -> tuple[Sequence[Any], Plan]:
    """Plan documents of these lengths; return the documents as the plan has them, and the plan.

    Common prefixes are documents of their own where model and planner are exact with them and the plan is predicted to
    be faster; otherwise the documents are returned as they are. `plan` makes plans as `choice.plan` does; None:
    `cached_plan`. `targets` are those of all documents. Where documents that begin alike are computed whole, the first
    rank logs why, once for each reason. Enters no collective: all ranks come to the same.
    """
    rules = call_rules(model)
    features = rules.separate_features(training=training)
    reasons = [f"{rules.architecture} has {name}" for name in features]
    sharing_choice = choice
    if choice.planner not in PREFIX_PLANNERS:
        reasons.append(f"planner {choice.planner!r} lays documents out alone")
        sharing_choice = replace(choice, planner=AUTO)  # still looks for prefix trees, to log why they are not used
    trees = sharing_choice.find_prefix_trees(documents, world.home, rules.length_limits)
    plan = plan or partial(cached_plan, choice)
    sharing_plan = plan_prefix_trees(plan, lengths, None if reasons else trees, world.home, targets=targets)
    if trees is not None and not reasons:
        if trees.left_out:
            reasons.append(
                f"max_tokens_per_slot lets a group hold {sharing_choice.most_tree_rows(world.home):,} rows"
            )
        elif sharing_plan.parents is None:
            reasons.append("that is predicted to be faster")
    if trees is not None and reasons and world.rank == 0:
        _log_once(" and ".join(reasons))
    if sharing_plan.parents is None:
        return documents, sharing_plan
    return cut_documents(documents, sharing_plan.lengths, sharing_plan.parents, depths=choice.depths), sharing_plan


def shared_prefixes_line(plan: Plan, shape: ModelShape | None) -> str:
    """Say what a step whose documents share prefixes computes once (docs/shared-prefixes.md)."""
    parents = plan.parents or ()
    whole = plan.whole_documents
    branches = [document for document in whole if parents[document] >= 0]
    prefixes = [document for document in range(len(parents)) if document not in set(whole)]
    trees = sum(parents[prefix] < 0 for prefix in prefixes)
    rows = sum(plan.lengths[prefix] for prefix in prefixes)
    line = (
        f"{plural(len(branches), 'document')} in {plural(trees, 'prefix tree')}: {rows:,} of "
        f"{plan.tokens + plan.spared_rows:,} tokens are computed once for all that begin with them"
    )
    if shape is not None:
        separate = model_flops(shape, [plan.path_lengths[document] for document in whole])
        line += f", {separate / model_flops(shape, plan.lengths, bases=plan.bases):.1f} times fewer operations"
    return line


def log_first_shared_prefixes(plan: Plan, world: World) -> None:
    """Log on the first rank, once in a process, what the first plan whose documents share prefixes computes once."""
    if plan.parents is not None and world.rank == 0 and not _LOGGED_SHARED.is_set():
        _LOGGED_SHARED.set()
        _log.warning("%s (docs/shared-prefixes.md)", shared_prefixes_line(plan, None))


@lru_cache(maxsize=8)
def cached_plan(choice: PlannerConfig, lengths: tuple[int, ...], home: Layout, **options: Any) -> Plan:
    """Return the plan that `choice.plan` makes; the plans of the last eight different arguments are kept."""
    return choice.plan(lengths, home, **options)


@cache
def _log_once(reasons: str) -> None:
    """The log's cache drops a second warning of the same reasons."""
    _log.warning("documents that begin alike are computed whole, as %s (docs/shared-prefixes.md)", reasons)

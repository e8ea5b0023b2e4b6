"""Which documents of a step share prefixes where nobody said so: those for which model and planner are exact."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.data.shared_prefixes import share_prefixes
from longspan.model.seams.call_rules import call_rules
from longspan.resolve.choice import PlannerConfig

_log = logging.getLogger(__name__)


def share_where_exact(
    model: nn.Module,
    documents: Sequence[Any],
    choice: PlannerConfig,
    world: World,
    *,
    training: bool,
    depths: int = 0,
) -> Sequence[Any]:
    """Return documents whose common prefixes are apart, or the same ones where model or planner take none apart.

    A line of the first rank says why they are the same, where documents would share some. `depths` of multi-token
    prediction are those of the step.
    """
    rules = call_rules(model)
    features = rules.separate_features(training=training, of_one_class=True)
    reasons = [f"{rules.architecture} has {name}" for name in features]
    if choice.planner not in ("auto", "fixed", "dynamic"):
        reasons.append(f"planner {choice.planner!r} lays documents out alone")
    rows = choice.options.rows  # of a slot
    shared = share_prefixes(
        documents,
        max_rows=rows and rows * choice.widest_even_degree(world.home),
        depths=depths,
        length_class=rules.length_class,
    )
    if not reasons:
        return shared
    if len(shared) > len(documents) and world.rank == 0:
        _log_once(" and ".join(reasons))
    return documents


@cache
def _log_once(reasons: str) -> None:
    _log.warning("documents that begin alike do not share their prefixes: %s (docs/shared-prefixes.md)", reasons)

"""Which documents of a step share prefixes where nobody said so: those for which model and planner are exact."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from longspan.comm import World
from longspan.config.keys import AUTO
from longspan.data.shared_prefixes import cut_documents
from longspan.model.seams.call_rules import call_rules
from longspan.resolve.choice import FAMILY_PLANNERS, PlannerConfig

_log = logging.getLogger(__name__)


def share_where_exact(
    model: nn.Module, documents: Sequence[Any], choice: PlannerConfig, world: World, *, training: bool
) -> Sequence[Any]:
    """Return documents whose common prefixes are apart, or the same ones where model or planner take none apart.

    A line of the first rank says why they are the same, where documents would share some.
    """
    rules = call_rules(model)
    features = rules.separate_features(training=training)
    reasons = [f"{rules.architecture} has {name}" for name in features]
    if choice.planner not in FAMILY_PLANNERS:
        reasons.append(f"planner {choice.planner!r} lays documents out alone")
        choice = replace(choice, planner=AUTO)
    families = choice.find_families(documents, world.home, rules.length_limits)
    if families is None:
        return documents
    if not reasons:
        return cut_documents(documents, *families, depths=choice.depths)
    if world.rank == 0:
        _log_once(" and ".join(reasons))
    return documents


@cache
def _log_once(reasons: str) -> None:
    _log.warning("documents that begin alike do not share their prefixes: %s (docs/shared-prefixes.md)", reasons)

"""Which documents of a step share prefixes where nobody said so: those for which model and planner are exact."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from longspan.data.shared_prefixes import share_prefixes
from longspan.layout import Layout
from longspan.model.seams.call_rules import call_rules
from longspan.resolve.choice import PlannerConfig


def share_where_exact(
    model: nn.Module, documents: Sequence[Any], choice: PlannerConfig, home: Layout, *, training: bool
) -> Sequence[Any]:
    """Return documents whose common prefixes are apart, or the same ones where model or planner take none apart."""
    if call_rules(model).separate_features(training=training) or choice.planner not in ("auto", "fixed", "dynamic"):
        return documents
    rows = choice.options.rows  # of a slot
    return share_prefixes(documents, max_rows=rows and rows * choice.widest_even_degree(home))

"""Prefixes that documents of a run share (docs/shared-prefixes.md): whether its model allows it, and what is said."""

from typing import Any

from longspan.comm.all_ranks import LogLine
from longspan.data.run_order import share_none
from longspan.data.step_order import StepOrder
from longspan.errors import plural
from longspan.model.kinds import find_language_model
from longspan.model.seams.call_rules import call_rules
from longspan.plan import Plan
from longspan.plan.shape.model_shape import ModelShape, model_flops


def share_by_model(order: StepOrder, model: Any, log: LogLine) -> None:
    """Let none share prefixes where the prepared model is exact for separate documents alone."""
    rules = call_rules(find_language_model(model))
    order.length_limits = rules.length_limits
    share_none(order, log, *rules.separate_features(training=True))


def shared_line(plan: Plan, shape: ModelShape | None) -> str:
    """Say what a step whose documents share prefixes computes once."""
    parents = plan.parents or ()
    whole = plan.whole_documents
    branches = [document for document in whole if parents[document] >= 0]
    prefixes = [document for document in range(len(parents)) if document not in set(whole)]
    families = sum(parents[prefix] < 0 for prefix in prefixes)
    line = f"{plural(len(branches), 'document')} in {families} {'family' if families == 1 else 'families'}: "
    line += (
        f"{sum(plan.lengths[prefix] for prefix in prefixes):,} of {plan.tokens + plan.spared_rows:,} tokens are "
    )
    line += "computed once for all that begin with them"
    if shape is not None:
        times = model_flops(shape, [plan.path_lengths[document] for document in whole]) / model_flops(
            shape, plan.lengths, bases=plan.bases
        )
        line += f", {times:.1f} times fewer operations"
    return line

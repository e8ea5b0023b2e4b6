"""Prefixes that documents of a run share (docs/shared-prefixes.md): whether they are computed once, and what is
said."""

from typing import Any

from longspan.comm.all_ranks import LogLine
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.data.documents import Corpus
from longspan.data.shared_prefixes import find_families
from longspan.data.step_order import StepOrder
from longspan.errors import plural
from longspan.model.kinds import find_language_model
from longspan.model.seams.call_rules import call_rules
from longspan.plan import Plan
from longspan.plan.shape.model_shape import ModelShape, model_flops
from longspan.resolve.choice import FAMILY_PLANNERS
from longspan.train.step_figures import plan_flops


def share_by_keys(config: RunConfig, order: StepOrder, corpus: Corpus, log: LogLine) -> None:
    """Let documents share prefixes, unless a key or the data are against it."""
    if config.data.share_prefixes != AUTO or corpus.targets is None or corpus.images:
        return
    order.sharing = corpus
    reasons = [f"context.planner {config.context.planner}"] * (config.context.planner not in FAMILY_PLANNERS)
    reasons += ["lora.dropout"] * (config.lora.dropout > 0)
    _share_none(order, log, *reasons)


def share_by_model(order: StepOrder, model: Any, log: LogLine) -> None:
    """Let none share prefixes where the prepared model is exact for separate documents alone."""
    rules = call_rules(find_language_model(model))
    order.length_limits = rules.length_limits
    _share_none(order, log, *rules.separate_features(training=True, same_frequencies=True))


def _share_none(order: StepOrder, log: LogLine, *reasons: str) -> None:
    if not reasons or order.sharing is None:
        return
    if max(find_families(order.select(order.sharing, 0)).parents) >= 0:
        log(
            f"documents that begin alike are computed whole, as {' and '.join(reasons)} is exact for separate "
            "documents alone"
        )
    order.sharing = None


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
        times = model_flops(shape, [plan.path_lengths[document] for document in whole]) / plan_flops(shape, plan)
        line += f", {times:.1f} times fewer operations"
    return line

"""Prefixes that documents of a run share (docs/shared-prefixes.md): whether they are computed once, and what is
said."""

from collections.abc import Iterator
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


def share_by_keys(config: RunConfig, order: StepOrder, corpus: Corpus, model: Any, log: LogLine) -> None:
    """Let documents share prefixes, unless a key or the data are against it; `model` is its configuration."""
    if config.data.share_prefixes == AUTO and corpus.targets is not None and not corpus.images:
        order.sharing = corpus
        _share_none(order, log, *_separate_keys(config, model))


def share_by_model(order: StepOrder, model: Any, log: LogLine) -> None:
    """Let none share prefixes where the prepared model is exact for separate documents alone."""
    _share_none(order, log, *call_rules(find_language_model(model)).separate_features(training=True))


def _separate_keys(config: RunConfig, model: Any) -> Iterator[str]:
    if config.context.planner not in (AUTO, *FAMILY_PLANNERS):
        yield f"context.planner {config.context.planner}"
    if config.mtp.num_layers:
        yield "multi-token prediction"
    if config.lora.dropout:
        yield "lora.dropout"
    balance = config.train.router_aux_loss_coef
    if balance < 0 and getattr(model, "output_router_logits", False):
        balance = model.router_aux_loss_coef
    if balance > 0 or config.train.router_z_loss_coef:
        yield "losses of routers"


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

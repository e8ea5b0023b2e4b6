"""What the keys of an evaluation set mean that were not given, and how a set stands for `context.eval_*`. No torch."""

from dataclasses import replace

from longspan.config.bounds import AUTO, NOT_GIVEN
from longspan.config.eval_set import PLAN_KEYS, EvalConfig
from longspan.config.sections import RunConfig
from longspan.plan.hierarchy import levels_at


def set_with_defaults(entry: EvalConfig, config: RunConfig) -> EvalConfig:
    """An evaluation set with a value for every key, of a configuration that has one for every other.

    As in [context], a degree that was given alone makes plans of that degree, and levels are fitted to it.
    """
    data, context, train = config.data, config.context, config.train
    inherited = {key: getattr(context, f"eval_{key}") for key in PLAN_KEYS}
    degree, cap = entry.context_parallel_size, entry.max_tokens_per_slot
    if degree == 0:
        entry = replace(entry, context_parallel_size=context.context_parallel_size)
    if (isinstance(degree, str) or degree > 0) and inherited["planner"] == "dynamic":
        inherited["planner"] = "fixed"
    if degree == AUTO:
        inherited["cp_comm_type"] = AUTO
    if cap == AUTO:
        entry = replace(entry, max_tokens_per_slot=context.max_tokens_per_slot)
    inherited |= {"max_document_tokens": data.max_document_tokens, "every": train.eval_every}
    inherited |= {"metrics": train.eval_metrics, "max_seconds": train.eval_seconds}
    sizes = entry.hierarchical_context_parallel_sizes
    entry = replace(
        entry, **{key: value for key, value in inherited.items() if getattr(entry, key) in (NOT_GIVEN, "", ())}
    )
    same = (entry.planner, entry.context_parallel_size) == (context.eval_planner, context.eval_context_parallel_size)
    degree = entry.context_parallel_size
    if sizes == NOT_GIVEN and entry.planner != "dynamic" and not same and not isinstance(degree, str):
        levels = levels_at(entry.hierarchical_context_parallel_sizes, degree)
        entry = replace(entry, hierarchical_context_parallel_sizes=levels)
    return entry


def held_out_set(config: RunConfig) -> EvalConfig:
    """The documents that `data.eval_documents` holds out, as the evaluation set without a name."""
    plan = {key: getattr(config.context, f"eval_{key}") for key in PLAN_KEYS}
    longest, train = config.data.max_document_tokens, config.train
    rest = {"every": train.eval_every, "metrics": train.eval_metrics, "max_seconds": train.eval_seconds}
    return EvalConfig(max_document_tokens=longest, **rest, **plan)

"""The model and machine that `plan` and `simulate` plan for: `--cost`, `--model`, `--heads`, and what a2a asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longspan.errors import ConfigError
from longspan.plan import Cost
from longspan.plan.cost.cost_file import read_cost
from longspan.plan.cost.model_cost import cost_on_h200
from longspan.plan.cost.model_shape import read_query_heads

DEFAULT_HEADS = 32  # of Qwen3-8B, which the default cost is of

NO_HEADS = (
    "a2a: the model's query heads are not known, and a degree that does not divide them cannot be trained;\n"
    "--model FOLDER or --heads N keeps to degrees that do"
)


@dataclass(frozen=True, kw_only=True)
class PricingFlags:
    """What the seconds of a plan are made of, and which degrees its model allows."""

    cost: str = ""
    """JSON file with the constants of a machine and model; empty: what --model says, else Qwen3-8B on GPUs of 400
    TFLOP/s."""
    model: str = ""
    """Folder or config.json of a transformers model: without --cost its sizes price the plan, on H200s; its query heads
    limit the degrees of a2a."""
    heads: int = 0
    """Query heads of the model, where there is no --model; 0: the 32 of Qwen3-8B, and not known with --cost."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    """How the slots of a group share attention."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """With a2a+p2p: the a2a and the p2p size."""


def read_price(flags: PricingFlags) -> Cost:
    """The cost of one device. Raises ConfigError for a file that holds none, PlanError for a model without a price."""
    if flags.model and not flags.cost:
        return cost_on_h200(flags.model)
    return read_cost(flags.cost, "--cost")


def heads_of(flags: PricingFlags) -> int | None:
    """The query heads of the model that is planned for; None where nothing tells them."""
    if flags.heads < 0:
        raise ConfigError(f"--heads is {flags.heads}; give the model's number of query heads, such as 32")
    if flags.heads and flags.model:
        raise ConfigError(f"--heads {flags.heads} and --model {flags.model}, which says its own; give one of them")
    if flags.model:
        return read_query_heads(flags.model)
    return flags.heads or (None if flags.cost else DEFAULT_HEADS)


def shared_arguments(flags: PricingFlags) -> dict[str, Any]:
    """What the flags say to every planner, but for the cost."""
    return {
        "cp_comm_type": flags.cp_comm_type,
        "hierarchical_context_parallel_sizes": flags.hierarchical_context_parallel_sizes or None,
        "heads": heads_of(flags),
    }


def notes_on(flags: PricingFlags) -> Sequence[str]:
    """What a reader of the plan has to know."""
    return [NO_HEADS] if "a2a" in flags.cp_comm_type and heads_of(flags) is None else []

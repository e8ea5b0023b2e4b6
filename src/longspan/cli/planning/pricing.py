"""The model and the machine that `plan` and `simulate` plan for, which make the seconds of a plan.

They are said by `--cost`, `--model`, `--heads` and `--weights`. In free mode over sharded parameters a step gathers
them before its first micro-batch and sums gradients after its last one, in a micro-batch that all slots enter. Its
seconds depend on the model's parameters (`--weights`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack

from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions
from longspan.plan.cost.cost import DEFAULT_COST
from longspan.plan.cost.model_cost import cost_on_h200, read_cost
from longspan.plan.cost.model_shape import read_query_heads
from longspan.plan.micro_batch import PartitionKind
from longspan.plan.planners.options import PlanKeywords
from longspan.plan.simulate.row_bytes import QWEN3_8B
from longspan.plan.simulate.which_partition import which_partition
from longspan.plan.simulate.which_type import with_price_of_type

DEFAULT_HEADS = 32  # of Qwen3-8B, which the default cost is of

NO_HEADS = (
    "a2a: the model's query heads are not known, and a degree that does not divide them cannot be trained;\n"
    "--model FOLDER or --heads N keeps to degrees that do"
)
NOT_COMPARED = (
    "a2a and a2a+p2p are not compared, for the model's query heads are not known; --model FOLDER or --heads N adds them"
)
UNPRICED = (
    "free mode: gathering sharded parameters and summing their gradients, once a step, is not in these seconds;\n"
    "--weights N adds it for a model of N parameters (8.19e9 for Qwen3-8B)"
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
    tflops: float = 0.0
    """What a device sustains, in 1e12 FLOP/s: prices the sizes of --model, or of Qwen3-8B, on such devices, whose links
    carry 350 GB/s inside a host and 40 elsewhere; 0: as --cost and --model say."""
    heads: int = 0
    """Query heads of the model, where there is no --model; 0: the 32 of Qwen3-8B, and not known with --cost."""
    mtp_depths: int = 0
    """With --model: depths of multi-token prediction behind it, which run in training steps; evaluations leave them
    out."""
    cp_comm_type: Literal["", "p2p", "all_gather", "a2a", "a2a+p2p", "auto"] = ""
    """How the slots of a group share attention; empty: of plan p2p, of hybrids the fastest, and of simulate the fastest
    for each row of a table; auto: chosen for each group, and by simulate as where it is empty."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    """With a2a+p2p: the a2a and the p2p size."""
    max_tokens_per_slot: int = 8192
    """Rows that a slot holds in one micro-batch, at most; 0: no limit, as if memory had none."""


def read_price(flags: PricingFlags, *, training: bool = True) -> Cost:
    """The cost of one device; of an evaluation, where it is not `training`, without depths of multi-token prediction.

    Raises ConfigError for a file that holds none and for depths of no model, PlanError for a model without a price.
    """
    depths = flags.mtp_depths
    if depths < 0 or (depths and (flags.cost or not flags.model)):
        found = f"--cost {flags.cost}, which was measured with what it has" if flags.cost else "no --model"
        raise ConfigError(
            f"--mtp-depths {depths} with {found if depths > 0 else 'depths below 0'}; give --model FOLDER, whose last "
            "layer depths are like, and a number from 0"
        )
    if flags.tflops:
        return _price_at(flags, depths if training else 0)
    if flags.model and not flags.cost:
        return cost_on_h200(flags.model, depths=depths if training else 0)
    return read_cost(flags.cost, "--cost")


def _price_at(flags: PricingFlags, depths: int) -> Cost:
    """The cost of a model on devices of so many TFLOP/s."""
    if flags.cost or not 0 < flags.tflops < math.inf:
        reason = f"--cost {flags.cost}, which has its own speed" if flags.cost else "a speed must be above 0"
        raise ConfigError(f"--tflops {flags.tflops:g}: {reason}; give one of --tflops and --cost, such as --tflops 400")
    cost = Cost.for_model(flags.model or QWEN3_8B, tflops=flags.tflops, depths=depths)
    return replace(cost, source=f"{'the model' if flags.model else 'Qwen3-8B'} on GPUs of {flags.tflops:g} TFLOP/s")


def heads_of(flags: PricingFlags) -> int | None:
    """The query heads of the model that is planned for; None where it has none, and where nothing tells them."""
    if flags.heads < 0:
        raise ConfigError(f"--heads is {flags.heads}; give the model's number of query heads, such as 32")
    if flags.heads and flags.model:
        raise ConfigError(f"--heads {flags.heads} and --model {flags.model}, which says its own; give one of them")
    if flags.model:
        return read_query_heads(flags.model)
    return flags.heads or (None if flags.cost else DEFAULT_HEADS)


def plan_options(flags: PricingFlags, **keywords: Unpack[PlanKeywords]) -> PlanOptions:
    """The planners' options that these flags say, and those of a verb."""
    sizes = flags.hierarchical_context_parallel_sizes or None
    hybrid = (keywords.get("cost") or DEFAULT_COST).states is not None
    said = PlanKeywords(
        max_tokens_per_slot=flags.max_tokens_per_slot or None,
        cp_comm_type=flags.cp_comm_type or ("auto" if hybrid else "p2p"),
        hierarchical_context_parallel_sizes=sizes,
        heads=heads_of(flags),
    )
    return PlanOptions(**said | keywords)


def planned(
    make: Callable[[PlanOptions], Plan], options: PlanOptions, partition: Literal["auto"] | PartitionKind = "auto"
) -> tuple[Plan, str]:
    """The plan of these options, priced under their type, and, of a hybrid, why its rows are dealt out as they are;
    "" otherwise. A `partition` "auto" of another model is zigzag.
    """
    if options.cost.states is None:
        return make(with_price_of_type(replace(options, partition="zigzag" if partition == "auto" else partition))), ""
    choice = which_partition(lambda way: make(way).predicted_seconds, options, partition)
    return make(choice.options), f"rows {choice.reason}"


def notes_on(flags: PricingFlags, types: str | None = None) -> Sequence[str]:
    """What a reader of the plan has to know; `types` are those of the plans, where the flags do not say them."""
    if flags.model or heads_of(flags) is not None:
        return []
    types = flags.cp_comm_type if types is None else types
    return [NO_HEADS] if "a2a" in types else [NOT_COMPARED] if types == "auto" else []


@dataclass(frozen=True, kw_only=True)
class ClosingFlags:
    """What the closing micro-batch of free mode is priced by."""

    weights: float = 0.0
    """With free mode: parameters that are sharded over the slots (8.19e9 for Qwen3-8B); their gathering before a step
    and the sum of their gradients after it are added to its seconds. 0: what the cost file says, else nothing."""
    dp_replicate: int = 1
    """With --weights: copies of them (HSDP), each sharded over slots / copies."""


def check_weights(flags: ClosingFlags, *, free: bool) -> None:
    """Raise ConfigError for a number that counts nothing, and in lockstep, where layers are gathered as they come."""
    if not 0 <= flags.weights < math.inf:
        raise ConfigError(f"--weights is {flags.weights:g}; give a model's number of parameters, such as 8.19e9")
    if flags.weights and not free:
        raise ConfigError(
            f"--weights {flags.weights:g} prices the closing micro-batch of free mode, and --mode is lockstep; add "
            "--mode free, or leave --weights out"
        )
    if flags.dp_replicate != 1 and not flags.weights:
        raise ConfigError(
            f"--dp-replicate {flags.dp_replicate} is how the weights of --weights are copied, and there are none; add "
            "--weights, or leave it out"
        )


def with_weights(cost: Cost, flags: ClosingFlags, *, slots: int, node_size: int, tp: int = 1) -> Cost:
    """The cost with the closing micro-batch of these weights, of which each of `tp` ranks of a slot holds a part."""
    if not flags.weights:
        return cost
    home = Layout(slots, dp_replicate=flags.dp_replicate)
    return cost.with_closing(flags.weights / tp, home, node_size=node_size)

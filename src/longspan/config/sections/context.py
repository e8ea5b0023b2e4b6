"""The section [context] of a configuration: who shares which documents. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from longspan.config.bounds import NOT_GIVEN, AtLeast, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class ContextConfig:
    """Who shares which documents, in training and in evaluation."""

    planner: Literal["fixed", "padded", "dynamic"] = "fixed"
    """fixed: packed documents at one degree; padded: one document a row; dynamic: a degree for each document."""
    context_parallel_size: PositiveInt = NOT_GIVEN
    """Slots that share a document in training (fixed and padded). Default: 1; tiny presets: 2."""
    cp_comm_type: str | tuple[str, ...] = ""
    """How they share it: p2p, all_gather, a2a, a2a+p2p or auto (docs/attention.md); one, or one for each layer.
    Default: p2p; of hybrids what partition is chosen with; tiny presets: the same."""
    partition: Literal["", "auto", "zigzag", "contiguous"] = ""
    """How rows of a document are split: zigzag (equal causal work), contiguous (one run a slot, faster under a2a), or
    auto: of hybrids what the cost says (docs/hybrid.md), otherwise zigzag. Default: auto; tiny presets: the same."""
    attention_kernel: str = ""
    """Attention kernel (longspan doctor --kernels); empty: the first that can."""
    mixer_kernels: tuple[str, ...] = ()
    """Kernels of state-space layers that are used only where named: mamba_ssm, causal_conv1d, or torch alone
    (docs/hybrid.md)."""
    hierarchical_context_parallel_sizes: int | tuple[int, ...] = (2, 2)
    """Sizes (a2a, p2p) of a2a+p2p; read with that type only."""
    min_dynamic_context_parallel_size: PositiveInt = 1
    """Smallest degree that the dynamic planner may choose."""
    max_dynamic_context_parallel_size: NonNegativeInt = 0
    """Largest degree that the dynamic planner may choose; 0: no limit."""
    max_tokens_per_slot: Annotated[int | str, AtLeast(0)] = NOT_GIVEN
    """Rows of one micro-batch on one slot, at most; 0: no limit; auto: as many as its memory holds, measured first.
    Default: auto; tiny presets: 1024."""
    node_size: PositiveInt = 8
    """Slots of one host: what the plan's cost model takes as near."""
    cost: str = ""
    """File of longspan bench calibrate: what steps cost here; empty: on GPUs the model on H200s (docs/planning.md)."""
    mode: Literal["lockstep", "free"] = "lockstep"
    """In training, who waits: lockstep: all slots for the slowest of a micro-batch; free: those that share a group."""
    plan_ahead: NonNegativeInt = 2
    """Coming steps whose dynamic plans another process makes meanwhile; 0: each when its step begins."""
    eval_planner: Literal["", "fixed", "padded", "dynamic"] = ""
    """Planner of evaluation. Default: as in training, or fixed where eval_context_parallel_size is given; tiny presets:
    fixed."""
    eval_context_parallel_size: Annotated[int | str, AtLeast(0)] = NOT_GIVEN
    """Slots that share a document in evaluation; this key alone changes the degree. 0: as in training; auto: the degree
    at which the cost says that evaluation is fastest. Default: 0; tiny presets: 4."""
    eval_cp_comm_type: str | tuple[str, ...] = ""
    """As cp_comm_type, in evaluation. Default: as in training; the fastest, where eval_context_parallel_size is auto;
    tiny presets: p2p, of hybrids as in training."""
    eval_partition: Literal["", "auto", "zigzag", "contiguous"] = ""
    """As partition, in evaluation; auto: what training has. Default: as in training; tiny presets: zigzag, of hybrids
    auto."""
    eval_max_tokens_per_slot: Annotated[int | str, AtLeast(0)] = NOT_GIVEN
    """As max_tokens_per_slot, in evaluation; auto: what training has. Default: as in training; tiny presets: 2048."""
    eval_hierarchical_context_parallel_sizes: int | tuple[int, ...] = NOT_GIVEN
    """As hierarchical_context_parallel_sizes, in evaluation. Default: as in training, fitted to the degree; tiny
    presets: 2 2."""
    eval_attention_kernel: str = ""
    """Attention kernel in evaluation; empty: as in training."""

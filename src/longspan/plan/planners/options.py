"""The options that all planners share, as one value (`PlanOptions`) and as keyword arguments."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, TypedDict, TypeVar

from longspan.plan.check import heads_allow_degree
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.micro_batch import Mode, PartitionKind

Planner = TypeVar("Planner", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `plan_fixed`, `plan_padded` and `plan_dynamic`, which take them as keyword arguments or as one value.

    >>> options = PlanOptions(max_tokens_per_slot=512, node_size=4)
    >>> plan = plan_fixed([900, 300, 20], Layout(ranks=8), cp=4, options=options)  # doctest: +SKIP

    A keyword argument given together with `options` wins. The planner checks the values.
    """

    max_tokens_per_slot: int | None = None
    """Rows that a slot holds in one micro-batch, at most, in whole multiples of `row_multiple`; None: no limit."""
    targets: int | None = None
    """Predicted tokens, by whose number the loss is divided; None: length − 1 of every document."""
    cp_comm_type: str | Sequence[str] = "p2p"
    """How the slots of a group share attention: p2p, all_gather, a2a, a2a+p2p or auto; one, or one for each layer."""
    hierarchical_context_parallel_sizes: int | Sequence[int] | None = None
    """Sizes (a2a, p2p) of a group under a2a+p2p, or only the a2a size; other types do not read it."""
    cost: Cost = DEFAULT_COST
    """Constants of the machine and the model, by which plans are compared."""
    node_size: int = 8
    """Slots of one host; groups inside a host use its fast links."""
    micro_batch_multiple: int = 1
    """The number of micro-batches is a multiple of this; dummy micro-batches are added."""
    mode: Mode = "lockstep"
    """Who waits: "lockstep": all slots for the slowest of each micro-batch; "free": only those that share a group."""
    row_multiple: int = 1
    """The rows of a slot are laid out in multiples of this (tp, under sequence parallelism)."""
    partition: PartitionKind = "zigzag"
    """How a group's rows are divided. "zigzag": each document's beginning and end in equal shares, so that every slot
    computes as much causal attention. "contiguous": documents end to end, one run of rows a slot; it saves copies under
    a2a, and under the other types a step takes longer than predicted."""
    heads: int | None = None
    """Query heads of the model, which the home's tp divides; with it, degrees that a2a or a2a+p2p cannot use are
    refused, or left out of dynamic plans. None: unknown, and `attend` raises the error in the step."""
    allow_empty: bool = True
    """No documents give a step of dummy micro-batches; False: they are an error."""
    parents: Sequence[int] | None = None
    """Of each document the one whose rows come before its own, -1 for none (`share_prefixes`); such a prefix tree stays
    in one group. None: no documents share a prefix."""

    def __post_init__(self) -> None:
        for name in ("cp_comm_type", "hierarchical_context_parallel_sizes", "parents"):
            if not isinstance(value := getattr(self, name), (str, int, NoneType)):
                object.__setattr__(self, name, tuple(value))

    @property
    def rows(self) -> int | None:
        """Rows that a slot can hold in whole row multiples; None: no limit."""
        cap = self.max_tokens_per_slot
        return None if cap is None else cap // self.row_multiple * self.row_multiple

    @property
    def types(self) -> tuple[str, ...]:
        """The communication types, one for each layer, or one for all."""
        if isinstance(self.cp_comm_type, str):
            return (self.cp_comm_type,)
        return tuple(self.cp_comm_type)

    def allows(self, degree: int, tp: int) -> bool:
        """Return whether groups of this degree suit the query heads, which `a2a`, if a layer has it, deals out to their
        slots of `tp` ranks.
        """
        return heads_allow_degree(degree, self.heads, self.types, tp)


class PlanKeywords(TypedDict, total=False):
    """The fields of `PlanOptions` as keyword arguments, for type checkers and editors, which cannot derive them."""

    max_tokens_per_slot: int | None
    targets: int | None
    cp_comm_type: str | Sequence[str]
    hierarchical_context_parallel_sizes: int | Sequence[int] | None
    cost: Cost
    node_size: int
    micro_batch_multiple: int
    mode: Mode
    row_multiple: int
    partition: PartitionKind
    heads: int | None
    allow_empty: bool
    parents: Sequence[int] | None


def expand_option_signature(planner: Planner) -> Planner:
    """Give a planner with `**keywords: Unpack[PlanKeywords]` a signature that lists every option and its default."""
    signature = inspect.signature(planner)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(PlanOptions)
    ]
    planner.__signature__ = signature.replace(parameters=[*parameters, *options])  # pyright: ignore[reportFunctionMemberAccess]
    return planner

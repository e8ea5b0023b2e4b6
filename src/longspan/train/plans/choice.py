"""Which planner makes a run's plans, with which options: `PlanChoice`, from the configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from longspan.config.bounds import AUTO
from longspan.config.eval_inheritance import held_out_set
from longspan.config.eval_set import EvalConfig
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, LongspanError, counted
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.check import heads_allow
from longspan.plan.hierarchy import levels_at
from longspan.plan.micro_batch import PartitionKind
from longspan.plan.planners.fixed import smallest_degree
from longspan.plan.planners.options import PlanKeywords
from longspan.plan.simulate.evaluation import plan_evaluation, widest_degree
from longspan.plan.simulate.simulate import slot_cost
from longspan.plan.simulate.type_and_partition import group_cost, options_at_degree
from longspan.train.plans.cost import cost_of
from longspan.train.plans.home import row_multiple_of


@dataclass(frozen=True)
class PlanChoice:
    """Which planner, at which degree, with which options: one of the two halves of [context].

    >>> training, evaluation = PlanChoice.training(config), PlanChoice.evaluation(config)
    >>> plan = evaluation.plan(lengths, home)
    """

    planner: str
    degree: int  # of fixed and padded plans; 0: the smallest that holds the documents
    min_degree: int  # of dynamic plans
    max_degree: int  # of dynamic plans; 0: no limit
    options: PlanOptions  # its cost is that of one device
    prefix: str  # of the keys of this half, for messages
    weights: int = 0  # parameters of a slot's rank, sharded over slots, whose gathering a free step pays for
    weight_bytes: int = 2  # of each; sums of gradients are in float32 at least

    @classmethod
    def fixed(cls, degree: int, **options: Unpack[PlanKeywords]) -> "PlanChoice":
        """Plans of one degree; `options` are those of `plan_fixed`.

        >>> PlanChoice.fixed(4, max_tokens_per_slot=2048, cp_comm_type="a2a").degree
        4
        """
        return cls("fixed", degree, 1, 0, _options(options), "")

    @classmethod
    def dynamic(cls, min_degree: int = 1, max_degree: int = 0, **options: Unpack[PlanKeywords]) -> "PlanChoice":
        """Plans of a degree for each document, from `min_degree` to `max_degree` (0: no limit).

        `options` are those of `plan_dynamic`.
        """
        return cls("dynamic", 1, min_degree, max_degree, _options(options), "")

    @classmethod
    def training(
        cls,
        config: RunConfig,
        *,
        cost: Cost | None = None,
        heads: int | None = None,
        weights: int = 0,
        weight_bytes: int = 2,
    ) -> "PlanChoice":
        """How training steps are planned, priced by the run's cost or else the file's.

        `heads` are the model's query heads, where they are known; `weights` those of its parameters that are on a
        slot's rank and sharded over slots, of `weight_bytes` each.
        """
        context = config.context
        options = PlanOptions(
            max_tokens_per_slot=_limit(context.max_tokens_per_slot),
            cp_comm_type=context.cp_comm_type or "p2p",
            hierarchical_context_parallel_sizes=context.hierarchical_context_parallel_sizes,
            cost=cost or cost_of(context),
            node_size=context.node_size,
            mode=context.mode,
            row_multiple=row_multiple_of(config.parallel),
            partition=_partition(context.partition),
            heads=heads,
        )
        options = replace(options, cost=group_cost(options.cost, options))
        degrees = context.min_dynamic_context_parallel_size, context.max_dynamic_context_parallel_size
        degree = context.context_parallel_size
        return cls(context.planner, degree, *degrees, options, "context.", weights, weight_bytes)

    @classmethod
    def evaluation(
        cls,
        config: RunConfig,
        entry: EvalConfig | None = None,
        *,
        cost: Cost | None = None,
        heads: int | None = None,
    ) -> "PlanChoice":
        """How evaluations are planned: those of a named set, or else of the documents that are held out.

        They are priced for forward passes alone. Where a degree "auto" is not chosen yet (`auto_degree.py`), plans
        have the smallest that holds their documents.
        """
        context, entry = config.context, entry or held_out_set(config)
        options = PlanOptions(
            max_tokens_per_slot=_limit(entry.max_tokens_per_slot),
            cp_comm_type=entry.cp_comm_type or "p2p",
            hierarchical_context_parallel_sizes=entry.hierarchical_context_parallel_sizes,
            partition=(partition := _partition(entry.partition or context.partition)),
            cost=(cost or cost_of(context)).forward_only().for_partition(partition),
            node_size=context.node_size,
            row_multiple=row_multiple_of(config.parallel),
            heads=heads,
        )
        degrees = context.min_dynamic_context_parallel_size, context.max_dynamic_context_parallel_size
        degree = 0 if isinstance(entry.context_parallel_size, str) else entry.context_parallel_size
        return cls(entry.planner, degree, *degrees, options, entry.prefix)

    @property
    def degree_key(self) -> str:
        """The key of the degree."""
        return self.prefix + "context_parallel_size"

    @property
    def comm_type_key(self) -> str:
        """The key of the communication type."""
        return self.prefix + "cp_comm_type"

    @property
    def comm_types(self) -> tuple[str, ...]:
        """The communication types, one, or one for each layer."""
        types = self.options.cp_comm_type
        return (types,) if isinstance(types, str) else tuple(types)

    def allows(self, degree: int, home: Layout) -> bool:
        """Whether a2a, where a layer uses it, can deal the query heads to groups of this degree."""
        return heads_allow(degree, self.options.heads, self.comm_types, home.tp)

    def at_degree(self, degree: int, *, longest: int) -> "PlanChoice":
        """The same documents at another fixed degree, under a cap that holds the longest of them.

        Of hierarchical sizes, the a2a level keeps what divides the degree.
        """
        options, cap = self.options, self.options.max_tokens_per_slot
        sizes = options.hierarchical_context_parallel_sizes
        if cap is not None:
            cap = max(cap, -(-longest // degree))
        if sizes is not None:
            sizes = levels_at(sizes, degree)
        options = replace(options, max_tokens_per_slot=cap, hierarchical_context_parallel_sizes=sizes)
        return replace(self, planner="fixed", degree=degree, options=options)

    def plan(self, lengths: Sequence[int], home: Layout, *, targets: int | None = None) -> Plan:
        """The plan of these documents. `targets` is how many tokens they predict (None: what the options say, or every
        token but a document's first).

        Micro-batches are a multiple of the pipeline stages, as interleaved schedules need them. Those of an evaluation
        may hold fewer rows than the limit allows, so that they fill the pipeline. Raises PlanError where the documents
        do not fit.
        """
        options = self.options_on(home)
        if targets is not None:
            options = replace(options, targets=targets)
        if self.planner == "dynamic":
            max_cp, widest = self.max_degree or None, widest_degree(home, options, self.max_degree)
            make = partial(plan_dynamic, lengths, home, min_cp=self.min_degree, max_cp=max_cp)
        else:
            widest = self.degree or smallest_degree(lengths, home, options)
            if not self.degree:
                options = options_at_degree(options, widest)
            make = partial(plan_padded if self.planner == "padded" else plan_fixed, lengths, home, widest)
        if options.cost.passes != "forward":
            return make(options=options)
        return plan_evaluation(lambda options: make(options=options), lengths, home, options, widest)

    def options_on(self, home: Layout) -> PlanOptions:
        """The planners' options on a home: the cost of its slots, and micro-batches for its stages."""
        return replace(self.options, cost=self._cost(home), micro_batch_multiple=home.pp)

    def check(self, longest: int, home: Layout, what: str) -> None:
        """Plan one document of `longest` tokens, or raise ConfigError with the keys that do not fit."""
        try:
            self.plan((longest,), home)
        except LongspanError as error:
            rows = f"{self.prefix}max_tokens_per_slot {self.options.max_tokens_per_slot or 0}"
            fixed = self.planner != "dynamic"
            degree = f"{self.degree_key} {self.degree or AUTO}"
            keys = f"{degree} and {rows} do not suit" if fixed else f"{rows} does not suit"
            raise ConfigError(f"{keys} {what} on {counted(len(home.ranks), 'rank')}: {error}") from error

    def _cost(self, home: Layout) -> Cost:
        """The cost of a slot, whose tensor-parallel ranks share it; in free mode with the closing of a step."""
        cost = slot_cost(self.options.cost, home.tp)
        if self.options.mode == "lockstep" or not self.weights:
            return cost
        gathered, reduced = self.weight_bytes, max(4, self.weight_bytes)
        node_size = self.options.node_size
        return cost.with_closing(self.weights, home, node_size=node_size, gather_bytes=gathered, reduce_bytes=reduced)


def degrees_to_compare(home: Layout, choice: PlanChoice | None = None) -> tuple[int, ...]:
    """Degrees 1, 2, 4, … that divide the slots, and the number of slots itself; those that a choice's heads allow."""
    powers = {2**i for i in range(home.slots.bit_length())} | {home.slots}
    divisors = sorted(degree for degree in powers if home.slots % degree == 0)
    return tuple(degree for degree in divisors if choice is None or choice.allows(degree, home))


def _options(keywords: PlanKeywords) -> PlanOptions:
    """Options that can be hashed, as plans of an evaluation are remembered by them: lists become tuples."""
    values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in keywords.items()}
    return PlanOptions(**values)


def _partition(kind: str) -> PartitionKind:
    """How rows are dealt out; zigzag where it is not chosen yet ("auto"), for slots have as many rows either way."""
    return "contiguous" if kind == "contiguous" else "zigzag"


def _limit(rows: int | str) -> int | None:
    """The rows of a slot that a key allows; None where there is no limit, or none is known yet ("auto")."""
    return None if isinstance(rows, str) else rows or None

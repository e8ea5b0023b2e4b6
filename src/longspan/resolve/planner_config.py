"""The plans of steps and evaluations from the configuration: planner, degree and options (`PlannerConfig`).

`context.planner` may be a dotted name: the planner is imported, called as `plan_dynamic` is (docs/planning.md), and its
plans checked and completed. What a configuration leaves open is decided in `resolved.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from longspan.config.file import nearest_hint
from longspan.config.keys import AUTO
from longspan.config.plan_section import (
    ONE_DEGREE,
    PLANNERS,
    PREFIX_PLANNERS,
    EvalConfig,
    PlanSection,
    name_of_key,
)
from longspan.config.sections import ParallelConfig, RunConfig, held_out_set
from longspan.data.shared_prefixes import PrefixTrees, find_prefix_trees
from longspan.data.step_order import StepOrder
from longspan.errors import ConfigError, LongspanError, PlanError, import_object, plural
from longspan.layout import Layout
from longspan.plan import AsyncPlanner, Cost, Plan, PlanOptions, plan_fixed, plan_padded
from longspan.plan.check import LongDocumentError, check_count, replace_argument_names
from longspan.plan.cost.cost import DEFAULT_COST
from longspan.plan.planners.fixed import smallest_fitting_degree
from longspan.plan.planners.options import PlanKeywords
from longspan.plan.planners.request import Request
from longspan.plan.shape.model_shape import read_query_heads
from longspan.plan.shape.positions import LengthLimit
from longspan.resolve.evaluation import options_at_degree, plan_evaluation, widest_dynamic_degree
from longspan.resolve.run_cost import cost_without_model

# The keys of a section of plans stand here by the planners' arguments.
KEYS = {
    "cp": "context_parallel_size",
    "min_cp": "min_dynamic_context_parallel_size",
    "max_cp": "max_dynamic_context_parallel_size",
    "max_tokens_per_slot": "max_tokens_per_slot",
    "cp_comm_type": "cp_comm_type",
    "hierarchical_context_parallel_sizes": "hierarchical_context_parallel_sizes",
}


DEFAULT_ROWS = 8192


def default_rows(least: int) -> int:
    """Return what max_tokens_per_slot "auto" is where no memory is planned: DEFAULT_ROWS, or `least`, the rows of a
    slot that the longest document needs, if that is more.
    """
    return max(DEFAULT_ROWS, least)


def plan_row_multiple(parallel: ParallelConfig) -> int:
    """Return the number of which a slot's rows are a multiple: under sequence parallelism its tp ranks, which take
    equal parts, else 1.
    """
    return parallel.tp if parallel.sequence_parallel else 1


def home_of(parallel: ParallelConfig, ranks: int) -> Layout:
    """Return the home of a run on so many ranks. Raises LayoutError if the degrees do not divide them."""
    return Layout(ranks, pp=parallel.pp, tp=parallel.tp, ep=parallel.ep, dp_replicate=parallel.dp_replicate)


def query_heads(*models: Any) -> int | None:
    """Return the query heads of the layers that attend, of several models those that divide each one's; None if none
    attends. A model is a configuration, a dict like one or a folder; None is none.
    """
    heads = list[int]()
    for model in (model for model in models if model is not None):
        text = model.get_text_config() if hasattr(model, "get_text_config") else None
        count = read_query_heads(model) if text is None else getattr(text, "num_attention_heads", None)
        heads += [count] if count else []
    return math.gcd(*heads) or None


@dataclass(frozen=True)
class PlannerConfig:
    """Which planner, at which degree, with which options: for training or for an evaluation.

    >>> training, evaluation = PlannerConfig.training(config), PlannerConfig.evaluation(config)
    >>> plan = evaluation.plan(lengths, home)
    """

    planner: str
    # The degree is that of fixed and padded plans; None: not chosen yet, and the smallest that holds the documents.
    degree: int | None
    # Dynamic plans have degrees between these; a `max_degree` of None is no limit.
    min_degree: int
    max_degree: int | None
    # The cost of the options is that of one device.
    options: PlanOptions
    # Messages name keys with this prefix.
    prefix: str
    # Depths of multi-token prediction read tokens behind a shared prefix.
    depths: int = 0

    def __post_init__(self) -> None:
        """Raise PlanError for a degree below 1."""
        for key, degree in (("cp", self.degree), ("min_cp", self.min_degree), ("max_cp", self.max_degree)):
            if degree is not None:
                check_count(name_of_key(self.prefix, KEYS[key]), degree)

    @classmethod
    def fixed(cls, degree: int | None, **options: Unpack[PlanKeywords]) -> "PlannerConfig":
        """Choose plans of one degree (None: the smallest that holds the documents); `options` are those of
        `plan_fixed`.

        >>> PlannerConfig.fixed(4, max_tokens_per_slot=2048, cp_comm_type="a2a").degree
        4
        """
        return cls("fixed", degree, min_degree=1, max_degree=None, options=PlanOptions(**options), prefix="")

    @classmethod
    def dynamic(
        cls, min_degree: int = 1, max_degree: int | None = None, **options: Unpack[PlanKeywords]
    ) -> "PlannerConfig":
        """Choose plans whose groups have any degree from `min_degree` to `max_degree` (None: no limit); `options` are
        those of `plan_dynamic`.
        """
        return cls("dynamic", None, min_degree, max_degree, PlanOptions(**options), prefix="")

    @classmethod
    def training(cls, config: RunConfig, *, cost: Cost | None = None, heads: int | None = None) -> "PlannerConfig":
        """Choose how training steps are planned, by the keys of [context]. `cost` is that of one device (None: that of
        a Qwen3-8B), `heads` are the model's query heads (None: unknown).
        """
        choice = cls._from_section(config.context, config, cost or cost_without_model(config), heads)
        options = replace(choice.options, mode="free" if config.context.mode == "free" else "lockstep")
        return replace(choice, options=options, depths=config.mtp.num_layers)

    @classmethod
    def evaluation(
        cls,
        config: RunConfig,
        entry: EvalConfig | None = None,
        *,
        cost: Cost | None = None,
        heads: int | None = None,
    ) -> "PlannerConfig":
        """Choose how evaluations are planned, of the set `entry` (None: held-out documents), priced for forward passes
        only; `cost` and `heads` are as in `training`.
        """
        entry = entry or held_out_set(config)
        cost = (cost or cost_without_model(config)).forward_only()
        choice = cls._from_section(entry, config, cost, heads)
        options = choice.options
        return replace(choice, options=replace(options, cost=cost.for_partition(options.partition)))

    @classmethod
    def unpriced(cls, section: PlanSection, config: RunConfig, heads: int | None = None) -> "PlannerConfig":
        """Choose by the keys of a section, without a price: for checks."""
        return cls._from_section(section, config, DEFAULT_COST, heads)

    @classmethod
    def _from_section(
        cls, section: PlanSection, config: RunConfig, cost: Cost, heads: int | None
    ) -> "PlannerConfig":
        """What is "auto" until it is resolved counts as one of its values: the planner as dynamic, rows as without a
        limit, the partition as zigzag. Pipeline schedules other than 1F1B are priced as 1F1B
        without virtual stages."""
        cap = section.max_tokens_per_slot
        node_size = config.context.node_size
        parallel = config.parallel
        options = PlanOptions(
            max_tokens_per_slot=None if isinstance(cap, str) else cap or None,
            cp_comm_type=section.cp_comm_type or "p2p",
            hierarchical_context_parallel_sizes=section.hierarchical_context_parallel_sizes or None,
            cost=replace(cost, chunks=parallel.vpp if parallel.pipeline_schedule == "1f1b" else 1),
            node_size=PlanOptions.node_size if isinstance(node_size, str) else node_size,
            row_multiple=plan_row_multiple(parallel),
            partition="contiguous" if config.context.partition == "contiguous" else "zigzag",
            heads=heads,
        )
        degree = section.context_parallel_size
        # Keys have 0 for a degree that is open, and for no largest one.
        degree = None if isinstance(degree, str) else degree or None
        degrees = section.min_dynamic_context_parallel_size, section.max_dynamic_context_parallel_size or None
        # "auto" counts as dynamic until it is resolved.
        planner = "dynamic" if section.planner == AUTO else section.planner
        return cls(planner, degree, *degrees, options, section.prefix)

    @property
    def has_one_degree(self) -> bool:
        return self.planner in ONE_DEGREE

    @property
    def least_gain(self) -> float:
        """How many times as fast as fixed plans in lockstep these must be, by prediction, to be preferred to them."""
        return (1.01 if self.planner == "dynamic" else 1.0) * (1.02 if self.options.mode == "free" else 1.0)

    @property
    def text(self) -> str:
        """The planner and, if all groups have one degree, that degree, as in "fixed at cp 4"."""
        if self.has_one_degree:
            return f"{self.planner} at cp {self.degree or AUTO}"
        return self.planner

    def widest_degree(self, home: Layout) -> int | None:
        """Return the highest degree that a group may have. Fixed and padded plans have only one, which is None if it
        is still open; a planner of one's own has no limit but the home's slots.
        """
        if self.has_one_degree:
            return self.degree
        limit = self.max_degree if self.planner == "dynamic" else None
        return min(limit or home.slots, home.slots)

    def widest_even_degree(self, home: Layout) -> int:
        """Return the highest degree of groups that fill the slots and that the query heads allow."""
        widest = self.widest_degree(home) or home.slots
        return max(d for d in range(1, widest + 1) if home.slots % d == 0 and self.options.allows(d, home.tp))

    @property
    def degree_key(self) -> str:
        """The key of its degree, for messages."""
        return self.prefix + "context_parallel_size"

    def at_degree(self, degree: int, *, longest: int) -> "PlannerConfig":
        """Return this choice for fixed plans at this degree, with a cap, if there is one, raised so far that a group
        holds a document of `longest` tokens.
        """
        cap = self.options.max_tokens_per_slot
        if cap is not None:
            cap = max(cap, -(-longest // degree))
        options = replace(options_at_degree(self.options, degree), max_tokens_per_slot=cap)
        return replace(self, planner="fixed", degree=degree, options=options)

    def plan(
        self,
        lengths: Sequence[int],
        home: Layout,
        *,
        targets: int | None = None,
        parents: Sequence[int] | None = None,
    ) -> Plan:
        """Plan these documents; `parents` are those of `share_prefixes`, which fixed and dynamic plans take.

        `targets` is how many tokens they predict (None: as the options say, or every token except a document's first).
        Micro-batches are a multiple of the pipeline stages, as interleaved schedules need them. Those of an evaluation
        may hold fewer rows than the limit allows, so that they fill the pipeline. Raises PlanError where the documents
        do not fit.
        """
        options = replace(self.home_options(home), parents=parents)
        if targets is not None:
            options = replace(options, targets=targets)
        if self.planner == "dynamic":
            from longspan.plan.dynamic.planner import plan_dynamic

            widest = widest_dynamic_degree(home, options, self.max_degree)
            make = partial(plan_dynamic, lengths, home, min_cp=self.min_degree, max_cp=self.max_degree)
        elif not self.has_one_degree:
            widest = home.slots
            make = partial(plan_by_custom_planner, self.planner, name_of_key(self.prefix, "planner"), lengths, home)
        else:
            widest = self.degree or smallest_fitting_degree(lengths, home, options)
            if not self.degree:
                options = options_at_degree(options, widest)  # the levels of a2a+p2p
            make = partial(plan_padded if self.planner == "padded" else plan_fixed, lengths, home, widest)
        if options.cost.passes != "forward":  # a training step
            return make(options=options)
        return plan_evaluation(lambda options: make(options=options), lengths, home, options, widest)

    def find_prefix_trees(
        self, documents: Sequence[Any], home: Layout, length_limits: Sequence[LengthLimit] = ()
    ) -> PrefixTrees | None:
        """Find prefixes that documents share, as these plans may have them; None if no documents begin alike, and for a
        planner that takes none. Documents are read as far as they begin alike. `length_limits` are those of the model's
        rotary frequencies.
        """
        if self.planner not in PREFIX_PLANNERS:
            return None
        most_rows = self.most_tree_rows(home)
        trees = find_prefix_trees(documents, max_rows=most_rows, depths=self.depths, length_limits=length_limits)
        if trees.left_out or trees.parents != (-1,) * len(documents):
            return trees
        return None

    def most_tree_rows(self, home: Layout) -> int | None:
        """Return the most rows that the documents of a prefix tree may have together: those of the widest group; None:
        no limit.
        """
        rows_of_slot = self.options.rows
        return rows_of_slot and rows_of_slot * self.widest_even_degree(home)

    def plan_documents(
        self,
        lengths: Sequence[int],
        documents: Sequence[Any] | None,
        home: Layout,
        *,
        targets: int | None = None,
        length_limits: Sequence[LengthLimit] = (),
    ) -> Plan:
        """Plan documents of these lengths, with common prefixes computed once where that is predicted to be faster.
        `documents` are read to find the prefixes; None: each document is computed whole.
        """
        if documents is None:
            return self.plan(lengths, home, targets=targets)
        trees = self.find_prefix_trees(documents, home, length_limits)
        return plan_prefix_trees(self.plan, lengths, trees, home, targets=targets)

    def home_options(self, home: Layout) -> PlanOptions:
        """Return the options of plans on a home: the cost is that of a slot of the home, and micro-batches come in
        multiples of its pipeline stages.
        """
        return replace(self.options, cost=self.options.cost.shared_by(home.tp), micro_batch_multiple=home.pp)

    def check_longest_document(self, longest: int, home: Layout, title: str) -> None:
        """Raise ConfigError, with the names of keys in place of arguments, where a document of `longest` tokens cannot
        be planned. `title` is what the error calls that document.
        """
        try:
            self.check_fits(longest, home)
        except LongDocumentError as error:
            rows = f"{name_of_key(self.prefix, 'max_tokens_per_slot')} {self.options.max_tokens_per_slot or 0}"
            degree = f"{self.degree_key} {self.degree or AUTO}"
            fault = f"{degree} and {rows} do not suit" if self.has_one_degree else f"{rows} does not suit"
            raise ConfigError(f"{fault} {title} on {plural(len(home.ranks), 'rank')}: {error}") from error
        except LongspanError as error:
            keys = {argument: name_of_key(self.prefix, key) for argument, key in KEYS.items()}
            raise ConfigError(replace_argument_names(str(error), keys)) from error

    def check_fits(self, longest: int, home: Layout) -> None:
        """Raise PlanError where no plan can hold a document of `longest` tokens, or the options are impossible."""
        options = self.options
        if self.has_one_degree:
            degree = self.degree or smallest_fitting_degree((longest,), home, options)
            options = options if self.degree else options_at_degree(options, degree)
            Request.from_arguments((longest,), home, options).check_degree(home, degree)
        elif self.planner == "dynamic":
            request = Request.from_arguments((longest,), home, options)
            request.check_degrees(self.min_degree, self.max_degree)
        else:  # only a planner of one's own knows what it allows
            self.plan((longest,), home)


def plan_prefix_trees(
    plan: Callable[..., Plan],
    lengths: Sequence[int],
    trees: PrefixTrees | None,
    home: Layout,
    *,
    targets: int | None = None,
) -> Plan:
    """Return the plan of prefix trees, in which prefixes are computed once, or that of separate documents of these
    `lengths`, whichever is predicted to be faster. `plan` makes both, as `PlannerConfig.plan` does.
    """
    separate = plan(lengths, home, targets=targets)
    if trees is None or max(trees.parents, default=-1) < 0:
        return separate
    shared = plan(trees.lengths, home, targets=targets, parents=trees.parents)
    return min(shared, separate, key=lambda plan: plan.predicted_seconds)


@dataclass(frozen=True)
class StepPlanner:
    """The plan of any training step, from its number. It can be pickled, so that another process may plan."""

    choice: PlannerConfig
    order: StepOrder
    home: Layout

    def __call__(self, step: int) -> Plan:
        lengths = self.order.lengths_of_step(step)
        targets = self.order.targets_of_step(step)
        documents = self.order.documents_to_share(step)
        limits = self.order.length_limits
        return self.choice.plan_documents(lengths, documents, self.home, targets=targets, length_limits=limits)


def plan_steps_ahead(choice: PlannerConfig, order: StepOrder, home: Layout, *, ahead: int = 2) -> AsyncPlanner:
    """Plan the training steps of a run; a context manager.

    Dynamic plans and those of a planner of one's own are made `ahead` steps early in another process; fixed and padded
    plans take a millisecond and are made when their step begins.
    """
    return AsyncPlanner(StepPlanner(choice, order, home), ahead=0 if choice.has_one_degree else ahead)


# ---- planners of one's own, by dotted name


def check_planner_exists(name: str, key: str) -> None:
    """Raise ConfigError, with the key that names it, for a planner that does not exist."""
    if name in PLANNERS:
        return
    if "." not in name:
        raise ConfigError(
            f"{key} is {name!r}; {nearest_hint(name, (AUTO, *PLANNERS))}, or a function of your own with its module, "
            "as in 'my_module.my_planner' (docs/planning.md)"
        )
    _import_planner(name, key)


def _import_planner(name: str, key: str) -> Callable[..., Any]:
    planner = import_object(name, f"{key} is {name!r}")
    if not callable(planner):
        raise ConfigError(
            f"{key} {name!r} is no function; name one of lengths, home and options that returns a Plan"
        )
    return planner


def plan_by_custom_planner(
    name: str, key: str, lengths: Sequence[int], home: Layout, *, options: PlanOptions
) -> Plan:
    """Plan by a planner of one's own, whose dotted `name` stands under `key`: its plan is checked, and completed by the
    options. Without documents it is not called.

    Raises PlanError, with the key that names the planner, if it fails or returns anything but a plan of these documents
    and slots, and for a plan that is not sound or exceeds the limit of rows.
    """
    request = Request.from_arguments(lengths, home, options)
    planner = _import_planner(name, key)
    if not request.lengths:  # a planner need not know what to do with a step without documents
        return request.make_plan((), name)
    documents = plural(len(request.lengths), "document")
    slots = plural(home.slots, "slot")
    try:
        plan = planner(request.lengths, home, options=options)
    except LongspanError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise PlanError(
            f"{key} {name!r} failed for {documents} on {slots}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, Plan) or (plan.slots, plan.lengths) != (home.slots, request.lengths):
        raise PlanError(
            f"{key} {name!r} returned {plan if isinstance(plan, Plan) else type(plan).__name__}; it must return a "
            f"longspan.Plan of {slots} (home.slots) and of the {documents} that it received, in their order"
        )
    try:
        return request.make_plan(plan.micro_batches, name)
    except PlanError as error:
        raise PlanError(f"{key} {name!r} returned a plan that cannot run: {error}") from error

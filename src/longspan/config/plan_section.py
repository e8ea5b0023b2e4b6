"""How documents are planned: the sections [context] and [evaluation], and the tables [[evaluation.sets]] of evaluation
sets. Imports no torch.

A `PlanSection` stands in three places: in [context] for training, in [evaluation], and in the table of one evaluation
set. What is not given in a table is as evaluation has it; what is not given for evaluation is as in training: see
`inherit_keys`. What they leave open is decided in `resolve`.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from longspan.config.keys import AUTO, NOT_GIVEN, AtLeast, Needs, NonNegativeInt, PositiveInt, Section
from longspan.errors import ConfigError
from longspan.plan.micro_batch import fit_level_sizes

# Plans of these planners have one degree.
ONE_DEGREE = ("padded", "fixed")
# These planners keep documents that share prefixes in one group.
PREFIX_PLANNERS = AUTO, "fixed", "dynamic"
# Another name is that of a function of the user's.
PLANNERS = (*ONE_DEGREE, "dynamic")
AnyPlan = TypeVar("AnyPlan", bound="PlanSection")
NumberOrAuto = Annotated[int | str, AtLeast(0)]
Types = str | tuple[str, ...]
Sizes = int | tuple[int, ...]


@dataclass(frozen=True)
class PlanSection(Section):
    """How documents are planned: by which planner, at which degree, under which limit of rows."""

    planner: str = NOT_GIVEN
    """fixed: packed documents at one degree; padded: one document a row; dynamic: a degree for each document; auto:
    dynamic, or fixed at the best degree where that is predicted as fast; or a function of your own by its dotted name
    (docs/planning.md). Degrees that are given decide auto: fixed where context_parallel_size is given, dynamic where a
    smallest or largest degree is. Default: auto; tiny presets: fixed."""
    context_parallel_size: NumberOrAuto = NOT_GIVEN
    """Slots that share a document in training (fixed and padded); 0: the degree at which the first steps are predicted
    fastest. Default: 0; tiny presets: 2, or 1 of an odd number of slots."""
    min_dynamic_context_parallel_size: PositiveInt = NOT_GIVEN
    """Smallest degree that the dynamic planner may choose."""
    max_dynamic_context_parallel_size: NonNegativeInt = NOT_GIVEN
    """Largest degree that the dynamic planner may choose; 0: no limit."""
    max_tokens_per_slot: NumberOrAuto = NOT_GIVEN
    """Rows of one micro-batch on one slot, at most; 0: no limit; auto: as its memory holds them (docs/memory.md).
    Default: auto; tiny presets: 1024, at degree 1 2048."""
    cp_comm_type: Types = NOT_GIVEN
    """How they share it: p2p, all_gather, a2a, a2a+p2p, auto or the dotted name of your own (docs/attention.md); one,
    or one for each layer. Default: auto; hybrid models: chosen together with partition; tiny
    presets: p2p, hybrids the same."""
    hierarchical_context_parallel_sizes: Sizes = NOT_GIVEN
    """Sizes (a2a, p2p) of a2a+p2p; 0: the best ones of each group. Read with that type only."""

    @property
    def plan_keys(self) -> dict[str, Any]:
        """The values of the keys that every plan section has, by key."""
        return {key.name: getattr(self, key.name) for key in fields(PlanSection)}

    @property
    def planner_of_degrees(self) -> str:
        """The planner by the degrees that are given: fixed with one, dynamic with a smallest or largest, else ""."""
        if self.context_parallel_size not in (NOT_GIVEN, 0, AUTO):
            return "fixed"
        has_smallest = self.min_dynamic_context_parallel_size not in (NOT_GIVEN, 1)
        has_largest = self.max_dynamic_context_parallel_size not in (NOT_GIVEN, 0)
        return "dynamic" if has_smallest or has_largest else ""


@dataclass(frozen=True)
class ContextConfig(PlanSection):
    """Who shares which documents in training."""

    SECTION: ClassVar[str] = "context"

    context_parallel_size: NonNegativeInt = NOT_GIVEN
    min_dynamic_context_parallel_size: PositiveInt = 1
    max_dynamic_context_parallel_size: NonNegativeInt = 0
    hierarchical_context_parallel_sizes: Sizes = 0
    partition: Literal["auto", "zigzag", "contiguous"] = NOT_GIVEN
    """How rows of a document are split, in evaluation too: zigzag (equal causal work), contiguous (one run a slot,
    faster under a2a), or auto: of hybrids what the cost chooses (docs/hybrid.md), otherwise zigzag. Default: auto; tiny
    presets: the same."""
    attention_kernel: str = ""
    """Attention kernel (docs/attention.md), or the dotted name of your own; empty: the first that can."""
    node_size: Annotated[int | str, AtLeast(1)] = AUTO
    """Slots of one host, whose links plans take as fast; auto: those of the world (LOCAL_WORLD_SIZE / tp), with which a
    number must agree."""
    mode: Annotated[
        Literal["auto", "lockstep", "free"],
        Needs("parallel.pp", (1,), value="free"),
        Needs("parallel.ep", (1,), value="free"),
    ] = "auto"
    """In training, who waits: lockstep: all slots for the slowest of a micro-batch; free: those that share a group;
    auto: free on GPUs that hold weights and gradients whole, where that is predicted faster, else lockstep."""


@dataclass(frozen=True)
class EvalConfig(PlanSection):
    """A named evaluation set: its documents, when they are evaluated, and under which plans.

    Nothing is left out of training for it: a run counts its documents that are trained on too, and says how many.

    The file may have any number of these tables, each with a name; flags do not reach them. What a table does not give
    is as in [evaluation].
    """

    SECTION: ClassVar[str] = "evaluation.sets"
    INHERITED: ClassVar[tuple[str, ...]] = (  # a degree of its own is enough, as plans change no figure
        "planner",
        "min_dynamic_context_parallel_size",
        "max_dynamic_context_parallel_size",
        "max_tokens_per_slot",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
    )

    context_parallel_size: NumberOrAuto = NOT_GIVEN
    """As evaluation.context_parallel_size; plans of the set are then fixed, and of the fastest type where it is auto.
    Default: the same."""
    name: str = ""
    """Letters, digits, - and _ and dots: in lines, in metrics.jsonl, and the folder RUN/evaluation/NAME."""
    path: str = ""
    """A folder or file of texts or rows, or stdlib, as data.path; tokenized with the run's tokenizer."""
    split: str = ""
    """As data.split."""
    documents: NonNegativeInt = 0
    """At most this many of its documents, chosen by train.seed; 0: all."""
    max_document_tokens: NonNegativeInt = NOT_GIVEN
    """As data.max_document_tokens, of this set. Default: the same."""
    every: NonNegativeInt = NOT_GIVEN
    """Steps between evaluations; 0: only after the last step. Default: evaluation.every."""

    @property
    def prefix(self) -> str:
        """How messages name the set before a key of it; the set without a name has evaluation's keys."""
        return f"{self.SECTION}.{self.name}." if self.name else "evaluation."


@dataclass(frozen=True)
class EvaluationPlan(PlanSection):
    """How documents are planned in evaluation."""

    SECTION: ClassVar[str] = "evaluation"
    INHERITED: ClassVar[tuple[str, ...]] = ("min_dynamic_context_parallel_size",)

    planner: str = NOT_GIVEN
    """Planner of evaluation. Default: as in training, or fixed where context_parallel_size is given, dynamic where a
    largest degree is; tiny presets: fixed."""
    context_parallel_size: NumberOrAuto = NOT_GIVEN
    """Slots that share a document in evaluation; this key alone changes the degree. 0: as in training; auto, or 0 where
    training's is chosen: the degree at which evaluation is fastest by the cost. Default: 0; tiny presets: 4, or 2 or 1
    where the slots are no multiple."""
    max_dynamic_context_parallel_size: NonNegativeInt = NOT_GIVEN
    """Largest dynamic degree of evaluation. Default: as in training."""
    max_tokens_per_slot: NumberOrAuto = NOT_GIVEN
    """As context.max_tokens_per_slot, in evaluation; auto: what training has. Default: as in training; tiny presets:
    2048."""
    cp_comm_type: Types = NOT_GIVEN
    """As context.cp_comm_type, in evaluation. Default: as in training; the fastest, where context_parallel_size is
    auto; tiny presets: p2p, of hybrids as in training."""
    hierarchical_context_parallel_sizes: Sizes = NOT_GIVEN
    """As context.hierarchical_context_parallel_sizes, in evaluation. Default: as in training, fitted to the degree."""


@dataclass(frozen=True)
class EvaluationSection(EvaluationPlan):
    """What is evaluated while a run trains, how often, and under which plans."""

    every: NonNegativeInt = 100
    """Steps between evaluations; 0: only after the last step."""
    patience: NonNegativeInt = 0
    """End the run after so many evaluations in a row without a better figure of checkpoint.keep_best, which is then
    eval_loss by default; model/, and verbs of the run, take the best weights, however it ends. 0: never."""
    prompts: Annotated[str, Needs("model.num_labels", (0,))] = ""
    """A file of prompts, a line or a row of .jsonl, .json or .csv each (docs/evaluation.md), which are completed after
    every so many steps and at the end: in RUN/completions.jsonl, the log, the loggers and the report."""
    max_new_tokens: PositiveInt = 128
    """Tokens of a completion, at most."""
    documents: NumberOrAuto = AUTO
    """Texts (rows, conversations) of the training data held out for evaluation, chosen by the seed, with all documents
    that they are cut or split into; 0: none; auto: one text in ten, at most 32, of tiny presets 8."""
    metrics: tuple[str, ...] = ()
    """Metrics of your own, with the loss and those built in: functions by their dotted names (docs/evaluation.md)."""
    sets: tuple[EvalConfig, ...] = ()
    """Named sets of documents of their own: tables [[evaluation.sets]]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.metrics:
            if not all(word.isidentifier() for word in name.split(".")) or "." not in name:
                raise ConfigError(
                    f"evaluation.metrics has {name!r}; give a function with its module, as in "
                    "'my_package.my_metrics.top_five'"
                )


def name_of_key(prefix: str, key: str) -> str:
    """Return the full name, for messages, of the key that a user sets for this field: the section's own, or for a field
    that is no key there (INHERITED) that of the section whose value it has.

    >>> name_of_key("evaluation.sets.books.", "planner")
    'evaluation.planner'
    """
    if prefix.startswith(f"{EvalConfig.SECTION}.") and key in EvalConfig.INHERITED:
        prefix = f"{EvaluationPlan.SECTION}."
    if prefix == f"{EvaluationPlan.SECTION}." and key in EvaluationPlan.INHERITED:
        prefix = f"{ContextConfig.SECTION}."
    return prefix + key


def inherit_keys(section: AnyPlan, parent: PlanSection, training: ContextConfig) -> AnyPlan:
    """Return a section of evaluation in which each key that is not given has its parent's value.

    The parent of an evaluation set is [evaluation], whose parent is `training`. A degree 0 and a limit of rows
    "auto" are those of training. A degree that is given decides the planner and, where it is "auto", the type. Levels
    that are not given are fitted to the degree, where the planner has only one.

    >>> config = ContextConfig(context_parallel_size=4, cp_comm_type="a2a", hierarchical_context_parallel_sizes=2)
    >>> evaluation = inherit_keys(PlanSection(context_parallel_size=8), config, config)
    >>> evaluation.cp_comm_type, evaluation.hierarchical_context_parallel_sizes
    ('a2a', (2, 4))
    """
    if section.planner == AUTO:
        section = replace(section, planner=section.planner_of_degrees or AUTO)
    inherited = parent.plan_keys
    degree = section.context_parallel_size
    if degree in (NOT_GIVEN, 0):
        inherited["planner"] = section.planner_of_degrees or parent.planner
    elif parent.planner not in ONE_DEGREE or (isinstance(degree, str) and isinstance(parent, ContextConfig)):
        # else the parent's, fixed or padded, at this degree; "auto" compares packed plans only
        inherited["planner"] = "fixed"
    if degree == AUTO:
        inherited["cp_comm_type"] = AUTO
    open_keys = {key: value for key, value in inherited.items() if getattr(section, key) in (NOT_GIVEN, "")}
    filled = replace(section, **open_keys)
    if filled.context_parallel_size == 0:
        filled = replace(filled, context_parallel_size=training.context_parallel_size)
    if filled.max_tokens_per_slot == AUTO:
        filled = replace(filled, max_tokens_per_slot=training.max_tokens_per_slot)
    if section.hierarchical_context_parallel_sizes != NOT_GIVEN or filled.planner not in ONE_DEGREE:
        return filled
    return replace(filled, hierarchical_context_parallel_sizes=_inherited_level_sizes(filled, parent))


def _inherited_level_sizes(section: PlanSection, parent: PlanSection) -> Sizes:
    """They fit the degree, unless the plan is the parent's, or the degree is chosen later (0 or "auto")."""
    sizes = parent.hierarchical_context_parallel_sizes
    degree = section.context_parallel_size
    if isinstance(parent, ContextConfig) and isinstance(degree, str):  # evaluation's "auto"
        degree = parent.context_parallel_size
    is_same_plan = (section.planner, degree) == (parent.planner, parent.context_parallel_size)
    if is_same_plan or not sizes or not degree or isinstance(degree, str):
        return sizes
    return fit_level_sizes(sizes, degree)

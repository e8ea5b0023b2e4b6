"""The partition of a hybrid's rows, zigzag or contiguous, and the communication type that goes with it.

Zigzag rows make a causal ring even, but the bytes of states grow with documents; contiguous rows are one run a slot,
and want an all-to-all of heads, which is even however rows are dealt out.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

from longspan.config.keys import AUTO
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig, with_evaluations
from longspan.errors import ConfigError, LongspanError, PlanError
from longspan.plan import PlanOptions
from longspan.plan.micro_batch import PARTITIONS, PartitionKind, comm_type_text
from longspan.resolve.facts import Facts
from longspan.resolve.planner_config import PlannerConfig
from longspan.resolve.ways import Way

# A hybrid's partition is chosen for the documents of so many steps.
PARTITION_STEPS = 4
# of hybrids; all_gather takes more memory the longer the documents are, which is not weighed
TYPES = ("a2a", "p2p")
# Of ways so close to the fastest the first is taken, contiguous before zigzag and a2a before p2p.
CLOSE = 1.02


class PartitionChoice(NamedTuple):
    """The options of the way that was chosen, and why in one line: the seconds of each way, or ratios under a cost that
    is of no machine, and which ways were not possible.
    """

    options: PlanOptions
    reason: str


def choose_partition(config: RunConfig, facts: Facts) -> tuple[RunConfig, str]:
    """Choose a partition, and a type in place of "auto", where the partition is "auto"; returns the configuration, and
    why in a line, "" if nothing was compared.

    The plans of the first PARTITION_STEPS steps are compared under each partition and type that the widest degree
    allows. A model whose cost has no `states` takes the usual partition. Raises PlanError where none is possible.
    """
    if config.context.partition != AUTO:
        return config, ""
    way = Way(config, facts)
    if way.cost().states is None:
        return set_default_partition(config), ""
    home = facts.home
    widest = way.choice.widest_degree(home)
    steps = [facts.lengths(step) for step in range(min(PARTITION_STEPS, max(1, facts.steps)))]

    def predict_seconds(options: PlanOptions) -> float:
        """Return the predicted seconds of the steps together. Raises ConfigError for a type that the heads forbid."""
        # A later document may be long enough to need the widest group; a degree that is open is chosen by the heads.
        if widest is not None and not options.allows(widest, home.tp):
            raise ConfigError(f"{options.cp_comm_type} cannot share {options.heads} heads among {widest} slots")
        candidate = replace(way.choice, options=options)
        return sum(candidate.plan(documents, home).predicted_seconds for documents in steps)

    options, reason = compare_partitions(predict_seconds, way.choice.options)
    context = replace(config.context, partition=options.partition)
    if context.cp_comm_type == AUTO:
        context = replace(context, cp_comm_type=options.cp_comm_type)
    config = replace(config, context=context)
    trained = PlannerConfig.training(config, heads=facts.heads)

    def give_training_type(entry: EvalConfig) -> EvalConfig:
        """Return the evaluation with training's type, if its type is "auto", its degree is given, and the heads allow
        that type there: with an open degree the type is chosen later.
        """
        choice = PlannerConfig.evaluation(config, entry, heads=facts.heads)
        if choice.options.cp_comm_type != AUTO or not choice.degree or not choice.has_one_degree:
            return entry
        allowed = trained.options.allows(choice.degree, home.tp)
        return replace(entry, cp_comm_type=context.cp_comm_type) if allowed else entry

    return with_evaluations(config, map(give_training_type, config.evaluations)), reason


def set_default_partition(config: RunConfig) -> RunConfig:
    """Return the configuration with "contiguous", which every model can have, in place of a partition "auto"."""
    if config.context.partition == AUTO:
        config = config.with_keys("context", partition="contiguous")
    return config


def compare_partitions(
    seconds_of: Callable[[PlanOptions], float],
    options: PlanOptions,
    partition: Literal["auto"] | PartitionKind = "auto",
) -> PartitionChoice:
    """Price a hybrid's plans under each partition and type that comes into question, and choose the first way that is
    nearly as fast as the fastest. A `partition` other than "auto" is the only one, and so is the type of `options`.
    `seconds_of` makes a plan under the options of a way and returns its predicted seconds; a way that it refuses with a
    LongspanError is left out. Raises PlanError where nothing is possible.
    """
    seconds = dict[PlanOptions, float]()
    refused = dict[PlanOptions, str]()
    types = TYPES if options.cp_comm_type == "auto" else (options.cp_comm_type,)
    kinds = reversed(PARTITIONS) if partition == "auto" else (partition,)
    for kind, cp_comm_type in product(kinds, types):
        way = replace(options, partition=kind, cp_comm_type=cp_comm_type)
        try:
            seconds[way] = seconds_of(way)
        except LongspanError as error:
            refused[way] = str(error)
    if not seconds:
        raise PlanError(f"no way to deal out rows is possible: {'; '.join(refused.values())}")
    chosen = next(way for way in seconds if seconds[way] <= CLOSE * min(seconds.values()))
    names = {way: f"{way.partition} under {comm_type_text(way.cp_comm_type)}" for way in (*seconds, *refused)}
    others = sorted((way for way in seconds if way is not chosen), key=seconds.__getitem__)
    if options.cost.source:
        texts = [f"{names[chosen]}: {seconds[chosen]:.3g} s predicted"]
        texts += [f"{names[way]} {seconds[way]:.3g} s" for way in others]
    else:
        texts = [f"{names[chosen]}, by cost"]
        texts += [f"{names[way]} {seconds[way] / seconds[chosen]:.3f} x as long" for way in others]
    return PartitionChoice(chosen, "; ".join([*texts, *(f"{names[way]} is not possible" for way in refused)]))

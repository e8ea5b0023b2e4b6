"""What "auto" becomes in a world: a hybrid's partition of rows, degrees of evaluations, slots of a host, the machine.

A partition is chosen by its cost on the first steps' documents, planner and degree of training by their plans under
the plan of memory. Evaluations with "auto" have training's, and its
communication type if their degree allows it. A degree is chosen by the forward passes of a set's documents at every
degree and, if the type is "auto" too, under every type, as `longspan plan --compare` does (`plan/ways.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from statistics import mean

import torch

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig, set_evaluations
from longspan.data.step_order import StepOrder
from longspan.errors import ConfigError, PlanError, plural
from longspan.layout import Layout
from longspan.plan import Cost, PlanOptions
from longspan.plan.ways import PartitionChoice, compare_degrees, compare_partitions, options_at_degree
from longspan.train.plans import PlannerConfig, degrees_to_compare
from longspan.train.plans.run_cost import KEY, leaves_plans_open, read_run_machine

STEPS = 4  # whose documents are planned for
NAMED = 3  # other choices in a reason


def choose_partition_on_ranks(
    config: RunConfig, order: StepOrder, world: World, *, cost: Cost, heads: int | None
) -> tuple[RunConfig, str]:
    """Choose a partition and a type in place of "auto", on the first rank; returns the configuration, and why."""
    if config.context.partition != AUTO:
        return config, ""
    lengths = [order.lengths_of_step(step) for step in range(STEPS)]
    work = partial(choose_partition, config, lengths, world.home, cost=cost, heads=heads)
    return run_on_first_rank(world, work, ConfigError)


def choose_partition(
    config: RunConfig, lengths: Sequence[Sequence[int]], home: Layout, *, cost: Cost, heads: int | None
) -> tuple[RunConfig, str]:
    """Choose for steps of documents of these lengths; a cost without `states` takes the usual partition."""
    if config.context.partition != AUTO or cost.states is None:
        return set_default_partition(config), ""
    choice = PlannerConfig.training(config, cost=cost, heads=heads)
    fastest = _choose_fastest_partition(choice, lengths, home)
    context, options = config.context, fastest.options
    if context.cp_comm_type == AUTO:
        context = replace(context, cp_comm_type=options.cp_comm_type)
    config = replace(config, context=replace(context, partition=options.partition))
    return _set_evaluation_types(config, home, heads), fastest.reason


def set_default_partition(config: RunConfig) -> RunConfig:
    if config.context.partition == AUTO:
        config = replace(config, context=replace(config.context, partition="contiguous"))
    return config


def _choose_fastest_partition(choice: PlannerConfig, lengths: Sequence[Sequence[int]], home: Layout) -> PartitionChoice:
    widest = choice.widest_degree(home)

    def predict_seconds(options: PlanOptions) -> float:
        candidate = replace(choice, options=options)
        if not candidate.allows(widest, home):  # a later document may be long enough to need the widest group
            raise ConfigError(f"{options.cp_comm_type} cannot share {options.heads} heads among {widest} slots")
        return sum(candidate.plan(documents, home).predicted_seconds for documents in lengths)

    return compare_partitions(predict_seconds, choice.options)


def _set_evaluation_types(config: RunConfig, home: Layout, heads: int | None) -> RunConfig:
    """An evaluation of type "auto" takes training's, unless its degree is chosen later, or is not one alone."""
    trained = PlannerConfig.training(config, heads=heads)

    def set_type(entry: EvalConfig) -> EvalConfig:
        choice = PlannerConfig.evaluation(config, entry, heads=heads)
        if choice.options.cp_comm_type != AUTO or not choice.degree or not choice.has_one_degree:
            return entry
        allowed = trained.allows(choice.degree, home)
        return replace(entry, cp_comm_type=config.context.cp_comm_type) if allowed else entry

    return set_evaluations(config, map(set_type, config.evaluations))


def choose_planner_on_ranks(
    config: RunConfig, order: StepOrder, world: World, *, longest: int, cost: Cost, heads: int | None
) -> tuple[RunConfig, str]:
    """Choose planner and degree on the first rank, by the first steps; returns the configuration, and why."""
    if not leaves_plans_open(config):
        return config, ""
    lengths = [order.lengths_of_step(step) for step in range(STEPS)]
    work = partial(choose_planner, config, lengths, world.home, longest=longest, cost=cost, heads=heads)
    return run_on_first_rank(world, work, ConfigError)


def choose_planner(
    config: RunConfig,
    lengths: Sequence[Sequence[int]],
    home: Layout,
    *,
    longest: int,
    cost: Cost,
    heads: int | None,
) -> tuple[RunConfig, str]:
    """Choose planner and degree of training where they are "auto" and 0, by the plans of steps of these documents.

    Returns the configuration, whose evaluations follow where they name no planner or degree, and why in one sentence.
    Only degrees that hold the `longest` document are tried; a dynamic plan must be faster than `least_gain` says.
    Raises ConfigError where no degree is possible.
    """
    if not leaves_plans_open(config):
        return config, ""
    context, is_open = config.context, config.context.planner == AUTO
    dynamic, kind = PlannerConfig.training(config, cost=cost, heads=heads), "fixed" if is_open else context.planner
    choices = [dynamic] * (is_open and home.slots > 1)
    for degree in degrees_to_compare(home, dynamic):
        options = options_at_degree(dynamic.options, degree)
        choices.append(replace(dynamic, planner=kind, degree=degree, options=options))
    ways, refusal = list[tuple[float, PlannerConfig]](), None
    for choice in choices:
        try:
            choice.plan((longest,), home)
            ways.append((mean(choice.plan(step, home).predicted_seconds for step in lengths), choice))
        except PlanError as error:
            refusal = error
    if not ways:
        raise ConfigError(f"{dynamic.degree_key}: no degree of {plural(home.slots, 'slot')} is possible: {refusal}")
    ways.sort(key=lambda way: way[0] * way[1].least_gain)
    best = ways[0][1]
    sizes = best.options.hierarchical_context_parallel_sizes or 0
    context = replace(context, planner=best.planner, hierarchical_context_parallel_sizes=sizes)
    context = replace(context, context_parallel_size=best.degree if best.has_one_degree else 1)

    def follow(entry: EvalConfig) -> EvalConfig:
        if entry.planner == AUTO:
            return replace(entry, planner=best.planner)
        is_open = entry.planner == "padded" and not entry.context_parallel_size
        return replace(entry, context_parallel_size=context.context_parallel_size) if is_open else entry

    evaluations = [follow(entry) for entry in config.evaluations]
    reason = _planner_reason(ways) if home.slots > 1 else ""
    return set_evaluations(replace(config, context=context), evaluations), reason


def _planner_reason(ways: Sequence[tuple[float, PlannerConfig]]) -> str:
    (least, best), *others = ways
    words = f"{best.planner}, degree {best.degree}" if best.has_one_degree else best.planner
    if not others:
        return f"{words}, which alone is possible"
    seconds = f"{least:.3g} s a step, " if best.options.cost.source else ""
    texts = [f"{_speed_text(other / least)} {_short_name(choice)}" for other, choice in others[:NAMED]]
    return f"{words} (predicted {seconds}{', '.join(texts)})"


def _short_name(choice: PlannerConfig) -> str:
    return f"degree {choice.degree}" if choice.has_one_degree else choice.planner


def _speed_text(times: float) -> str:
    """How fast a plan is beside one that takes so many times as long."""
    percent = 100 * (times - 1)
    if abs(percent) < 0.5:
        return "as fast as"
    if times >= 1.5:
        return f"{times:.1f} times as fast as"
    return f"{abs(percent):.0f} % {'faster' if percent > 0 else 'slower'} than"


def choose_degree(
    choice: PlannerConfig, lengths: Sequence[int], home: Layout, *, name: str = ""
) -> tuple[PlannerConfig, str]:
    """Choose the fastest degree for these documents, of evaluation set `name`, and say why.

    A communication type "auto" becomes the fastest one. A choice that has a degree stays, with the reason "". Raises
    ConfigError if no degree is possible.
    """
    if choice.degree or not choice.has_one_degree or not len(lengths):
        return choice, ""
    try:
        dynamic = choice.min_degree, choice.max_degree
        comparison = compare_degrees(lengths, home, options=choice.home_options(home), dynamic_degrees=dynamic)
    except PlanError as error:
        ranks = plural(len(home.ranks), "rank")
        raise ConfigError(f'{choice.degree_key} is "auto" on {ranks}: {error}') from error
    best = comparison.best
    options = replace(
        choice.options,
        cp_comm_type=best.options.cp_comm_type,
        hierarchical_context_parallel_sizes=best.options.hierarchical_context_parallel_sizes,
    )
    return replace(choice, degree=best.cp, options=options), comparison.reason(name)


def choose_degree_on_ranks(
    choice: PlannerConfig, lengths: Sequence[int], world: World, *, name: str = ""
) -> tuple[PlannerConfig, str]:
    """Choose on the first rank, as hosts may round times differently; returns the choice and why; all ranks call it."""
    if choice.degree or not choice.has_one_degree:
        return choice, ""
    work = partial(choose_degree, choice, [int(n) for n in lengths], world.home, name=name)
    return run_on_first_rank(world, work, ConfigError)


def choose_degrees(
    config: RunConfig,
    lengths: Mapping[str, Sequence[int]],
    world: World,
    *,
    cost: Cost,
    heads: int | None,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Choose degree, type and levels for every evaluation set whose degree is "auto"; all ranks call it together.

    Returns the configuration and a line for each such set. `lengths` are by the name of the set ("": held-out
    documents).
    """
    entries, reasons = list[EvalConfig](), list[str]()
    for entry in config.evaluations:
        choice = PlannerConfig.evaluation(config, entry, cost=cost, heads=heads)
        set_lengths = lengths.get(entry.name, ())
        choice, reason = choose_degree_on_ranks(choice, set_lengths, world, name=entry.name)
        entries.append(_set_chosen_degree(entry, choice) if reason else entry)
        reasons += [reason] if reason else []
    return set_evaluations(config, entries), tuple(reasons)


def _set_chosen_degree(entry: EvalConfig, choice: PlannerConfig) -> EvalConfig:
    types, sizes = choice.options.cp_comm_type, choice.options.hierarchical_context_parallel_sizes
    return replace(
        entry,
        context_parallel_size=choice.degree,
        cp_comm_type=types if isinstance(types, str) else tuple(types),
        hierarchical_context_parallel_sizes=tuple(sizes) if isinstance(sizes, Sequence) else sizes or 0,
    )


def set_node_size(config: RunConfig, world: World) -> RunConfig:
    """Set how many slots a host of this world has, in place of "auto"; ConfigError, on all ranks, for another one."""
    number, slots = config.context.node_size, world.node_size
    if number not in (AUTO, slots):
        raise ConfigError(
            f"context.node_size is {number}, and this world has {plural(slots, 'slot')} a host "
            f'(LOCAL_WORLD_SIZE / tp); use {slots}, or "{AUTO}", its default'
        )
    return replace(config, context=replace(config.context, node_size=slots))


def set_world_machine(config: RunConfig, world: World) -> None:
    """Let a world resolve "auto" by the machine of `run.machine`; entered by all ranks.

    Raises ConfigError, on every rank, for a file of another device or of hosts of another size, CommError if files
    differ.
    """
    if not config.run.machine:
        return
    machine = run_on_every_rank(world, lambda: read_run_machine(config), ConfigError)
    assert machine is not None
    digest = sha256(json.dumps(machine.to_json(), sort_keys=True).encode()).hexdigest()
    hint = f"{KEY} names a file that differs between hosts; copy one file to all of them"
    world.control.compare_digests(digest, what="machines", hint=hint)
    ranks = len(world.home.ranks)
    ranks_of_host = min(ranks, world.node_size * world.home.tp)  # node_size counts slots, each of tp ranks
    measured = machine.device, min(machine.world, machine.node_size)
    if machine.world and measured != (device_name(world.device), ranks_of_host):
        raise ConfigError(
            f"{KEY} {machine.source} was measured on {measured[0]} with {plural(measured[1], 'rank')} on a host, and "
            f"this run is on {device_name(world.device)} with {ranks_of_host}; measure again: longspan bench calibrate"
        )
    world.machine = machine


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

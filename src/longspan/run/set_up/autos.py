"""What a run resolves before its model is made, and after: documents, partition, rows of a slot, degrees, prices.

The configuration has values in place of each "auto" then, the same on all ranks.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig, check_measures
from longspan.data.documents import Corpus
from longspan.errors import ConfigError, ModelError
from longspan.model.load import check_folder
from longspan.plan import Cost
from longspan.run.run_data import RunData, TrainingRun, open_data, with_eval_tables
from longspan.run.set_up.resume import check_steps_left
from longspan.train.memory.slot_rows import choose_rows
from longspan.train.plans import find_run_cost, query_heads
from longspan.train.plans.order import set_epoch_steps, source_lines
from longspan.train.plans.resolve import choose_degrees, choose_partition_on_ranks, set_node_size, use_machine
from longspan.train.training import model_configuration

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan


def open_run_documents(
    config: RunConfig, checkpoint: Path | None, state: dict[str, Any], world: World, log: LogLine
) -> tuple[RunConfig, RunConfig, RunData]:
    """Open the documents of a run; return its configuration, the one to write as config.toml, and the data.

    The configuration then has numbers in place of what depends on documents or hosts: held-out documents, slots of a
    host, and the steps of `train.epochs`.
    """
    if state and config.data.eval_documents == AUTO:
        config = replace(config, data=replace(config.data, eval_documents=state["config"]["data"]["eval_documents"]))
    node_size, config = config.context.node_size, set_node_size(config, world)
    use_machine(config, world, log)
    if config.model.path and checkpoint is None:  # what its files lack is found before a corpus is made
        run_on_every_rank(world, lambda: check_folder(config.model.path), ModelError)
    model_config = run_on_every_rank(world, lambda: model_configuration(config, config.data.vocab_size), ModelError)
    data = open_data(config, model_config, checkpoint, world, log)
    config = replace(config, data=replace(config.data, eval_documents=data.order.held_out_texts))
    # not node_size and the steps of epochs: a run that goes on may be on other hosts, and resolves both anew
    as_written = replace(config, context=replace(config.context, node_size=node_size))
    config = set_epoch_steps(config, data.order, log)
    for line in source_lines(config, data.order):
        log(line)
    if checkpoint is not None:
        check_steps_left(config, data, checkpoint, state, log)
    data.check_fit(config, world)
    return config, as_written, data


def choose_run_partition(
    config: RunConfig, data: RunData, configuration: Any, world: World, log: LogLine
) -> tuple[RunConfig, str]:
    """Return the configuration with a partition in place of "auto", which memory depends on, and why."""
    # without a log or a plan of memory: `set_up` prices the model once more, with both
    price = partial(model_cost, config, world, configuration, data.corpus, log=lambda line: None, memory=None)
    cost = run_on_every_rank(world, price, ConfigError)
    return choose_partition_on_ranks(config, data.order, world, log, cost=cost, heads=query_heads(data.model))


def plan_run_memory(
    config: RunConfig, data: RunData, configuration: Any, world: World, log: LogLine, *, done: int
) -> "tuple[RunConfig, MemoryPlan | None]":
    """Plan the memory of the steps after `done`; return the configuration with rows of a slot, and the plan if any.

    A slot is expected to encode UNEVEN times the mean rows of images, as some steps have more, but not more than
    encoder.max_rows at once.
    """
    gpu, train = world.device.type == "cuda", config.train
    if not gpu and not train.memory_bytes and config.context.max_tokens_per_slot != AUTO:
        if done < train.steps:
            check_measures(train, gpu=False)
        return config, None  # no bytes are known that a rank may fill
    from longspan.train.memory.run_memory import UNEVEN, ComingSteps, RunMemory

    heads, (longest, _) = query_heads(data.model), data.longest
    ahead = ComingSteps(data.order.lengths_of_step, world.home, heads, done, train.steps, longest=longest)
    rows = math.ceil(UNEVEN * data.image_rows(config) / world.home.slots)
    run_memory = RunMemory(
        config=config,
        model=configuration,
        ahead=ahead,
        gpu=gpu,
        target_share=_target_share(data.corpus),
        encoder_rows=min(rows, config.encoder.max_rows or rows),
    )
    return choose_rows(run_memory, world, log, finished=done == train.steps)


def resolve_evaluations(run: TrainingRun, data: RunData, log: LogLine) -> TrainingRun:
    lengths, heads = {s.name: s.documents.lengths for s in data.sets}, query_heads(data.model)
    config, why = choose_degrees(run.config, lengths, run.world, log, cost=run.cost, heads=heads)
    return replace(run, config=config, sets=with_eval_tables(data.sets, config), why_degrees=why)


def model_cost(
    config: RunConfig, world: World, model: Any, corpus: Corpus, log: LogLine, memory: "MemoryPlan | None"
) -> Cost:
    """Return the cost of a model, whose layers keep what a plan of memory says, or without one (None) the keys."""
    gpu, share, slots = world.device.type == "cuda", _target_share(corpus), world.home.slots
    return find_run_cost(config, model, log, gpu=gpu, slots=slots, target_share=share, memory=memory)


def _target_share(corpus: Corpus) -> float:
    tokens = max(1, int(corpus.lengths.sum()))
    return 1.0 if corpus.targets is None else min(1.0, float(corpus.targets.sum()) / tokens)

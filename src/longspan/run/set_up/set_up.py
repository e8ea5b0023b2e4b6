"""`set_up`: from a configuration to everything that a run works with, and the step it is at.

Every check that needs the data or the model is made here, on every rank, before the first step.
"""

from dataclasses import replace
from pathlib import Path

from longspan.checkpoint.checkpoint import load_checkpoint
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, on_every_rank, on_first_rank
from longspan.config.file import to_toml
from longspan.config.precision import warn_of_lost_updates
from longspan.config.sections import RunConfig
from longspan.data.documents import Corpus
from longspan.errors import ModelError, RunFolderError
from longspan.evaluation.auto_degree import with_degrees
from longspan.files import write_atomically
from longspan.model.hf_folder import weight_files
from longspan.model.multimodal.multimodal_model import language_model_of
from longspan.model.seams.randomness import refuse_randomness
from longspan.plan import Cost
from longspan.plan.cost.spans import with_spans
from longspan.run.evaluations.open_sets import with_rows
from longspan.run.set_up.data import RunData, open_data
from longspan.run.set_up.model import prepared_for
from longspan.run.set_up.resume import check_steps_left, checkpoint_to_resume, rate_line, with_held_out_of
from longspan.run.training_run import TrainingRun
from longspan.train.memory.rows_that_fit import measure_rows
from longspan.train.plans import cost_of_run, query_heads
from longspan.train.plans.order import source_lines, with_steps_of_epochs
from longspan.train.plans.partition import with_partition
from longspan.train.training import AnyModel, make_optimizer, model_configuration


def set_up(config: RunConfig, world: World, log: LogLine) -> TrainingRun:
    """Open or begin the run of this configuration, which `check_config` has passed; all ranks call it together.

    Raises ConfigError, DataError, ModelError or CheckpointError, the same on every rank, for what does not fit.
    """
    directory = Path(config.run.dir)
    checkpoint = checkpoint_to_resume(config, world, log)
    config = with_held_out_of(config, checkpoint, world)
    if config.model.path and checkpoint is None:
        on_every_rank(world, lambda: weight_files(Path(config.model.path)), ModelError)
    named = on_every_rank(world, lambda: model_configuration(config, config.data.vocab_size), ModelError)
    data = open_data(config, named, checkpoint, world, log)
    config = replace(config, data=replace(config.data, eval_documents=len(data.order.evaluation)))
    asked, config = config, with_steps_of_epochs(config, data.order, log)
    for line in source_lines(config, data.order):
        log(line)
    if checkpoint is not None:
        check_steps_left(config, world, checkpoint, log)
    data.check_fit(config, world)
    model = prepared_for(data, config, world, log, resumed=checkpoint is not None)
    refuse_randomness(language_model_of(model))
    world.seed = config.train.seed
    optimizer = make_optimizer(config, world, model)
    done = 0
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, model, optimizer, world)
        done = int(state["step"])
        log(f"going on from {checkpoint}: {done} of {config.train.steps} steps are done")
        if done < config.train.steps and (line := rate_line(config, state)):
            log(line)
    if done < config.train.steps:  # a finished run keeps the configuration that it was trained with
        on_first_rank(world, lambda: write_atomically(directory / "config.toml", to_toml(asked)), RunFolderError)
        warn_of_lost_updates(config, log)
    cost = _cost(config, world, model, data.corpus, log)
    run = TrainingRun(config, world, model, optimizer, cost, data.corpus, data.order, done)
    return _with_plans(run, data, log)


def _with_plans(run: TrainingRun, data: RunData, log: LogLine) -> TrainingRun:
    """The run with its evaluation sets, and with values in place of "auto": a partition, rows of a slot, degrees."""
    world, cost, heads = run.world, run.cost, query_heads(data.model)
    config, why_partition = with_partition(run.config, run.order, world, log, cost=cost, heads=heads)
    image_rows = data.image_rows(config.train.tokens_per_step)
    config = measure_rows(config, run.model, run.optimizer, world, log, image_rows=image_rows)
    data.check_fit(config, world)
    lengths = {s.name: s.documents.lengths for s in data.sets}
    config, why = with_degrees(config, lengths, world, log, cost=cost, heads=heads)
    sets = with_rows(data.sets, config)
    return replace(run, config=config, sets=sets, why_degrees=why, why_partition=why_partition)


def _cost(config: RunConfig, world: World, model: AnyModel, corpus: Corpus, log: LogLine) -> Cost:
    cost = cost_of_run(config, model.config, log, gpu=world.device.type == "cuda")
    if corpus.images is None or not len(corpus.images):
        return cost
    return with_spans(cost, model.config, corpus.images.column("rows").tolist(), int(corpus.lengths.sum()))

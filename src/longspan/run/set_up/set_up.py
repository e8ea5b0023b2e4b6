"""`set_up`: open the data and the model of a configuration, resume from a checkpoint, resolve "auto" values."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from longspan.checkpoint.checkpoint import load_checkpoint
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.defaults import settings_text, warn_about_updates
from longspan.config.file import to_toml
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, RunFolderError
from longspan.files import write_atomically
from longspan.run.checks import check_config
from longspan.run.run_data import TrainingRun
from longspan.run.set_up.autos import (
    choose_run_partition,
    model_cost,
    open_run_documents,
    plan_run_memory,
    resolve_evaluations,
)
from longspan.run.set_up.resume import checkpoint_to_resume, rate_line
from longspan.run.set_up.run_model import check_adapter_targets, fit_configuration, set_up_model
from longspan.train.starts import Starts
from longspan.train.training import make_optimizer


def check_run(config: RunConfig, world: World, log: LogLine) -> None:
    """Raise ConfigError or ModelError, on every rank, for what needs neither the run's data nor its folder."""
    check_config(config, len(world.home.ranks))
    check_adapter_targets(config, world, log)


def set_up(config: RunConfig, world: World, log: LogLine, starts: Starts) -> TrainingRun:
    """Open or begin the run of a configuration that `check_run` has passed; all ranks call it together, before step 1.

    Raises ConfigError, DataError, ModelError or CheckpointError, the same on every rank, for what does not fit.
    `starts` notes how long the parts of the set-up take.
    """
    log(settings_text(config))
    checkpoint, state = checkpoint_to_resume(config, world, log)
    config, as_written, data = open_run_documents(config, checkpoint, state, world, log)
    configuration = fit_configuration(data, config, world, log)
    config, why_partition = choose_run_partition(config, data, configuration, world, log)
    done = int(state.get("step", 0))
    starts.end_part("data")
    config, memory = plan_run_memory(config, data, configuration, world, log, done=done)
    data.check_fit(config, world)  # again: the longest document may need more rows than fit
    starts.end_part("plan of memory")
    model = set_up_model(data, config, configuration, memory, world, log, resumed=checkpoint is not None)
    starts.end_part("model")
    world.seed = config.train.seed
    optimizer = make_optimizer(config, world, model, memory=memory)
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, optimizer, world)
        log(f"going on from {checkpoint}: {done} of {config.train.steps} steps are done")
        if done < config.train.steps and (line := rate_line(config, state)):
            log(line)
    if done < config.train.steps:  # a finished run keeps the configuration that it was trained with
        file = Path(config.run.dir) / "config.toml"
        run_on_first_rank(world, lambda: write_atomically(file, to_toml(as_written)), RunFolderError)
        warn_about_updates(config, log)
    price = partial(model_cost, config, world, model.config, data.corpus, log=log, memory=memory)
    cost = run_on_every_rank(world, price, ConfigError)
    starts.end_part("optimizer and costs")
    run = TrainingRun(config, world, model, optimizer, cost, data.corpus, data.order, done)
    return resolve_evaluations(replace(run, why_partition=why_partition, memory=memory), data, log)

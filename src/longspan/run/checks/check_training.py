"""Whether numbers are within their bounds, and whether [parallel], recomputation and the optimizer fit together."""

import math
from collections.abc import Collection
from typing import Any

from longspan.checkpoint.store_path import as_root
from longspan.config.keys import AUTO, NOT_GIVEN, Above, AtLeast, key_value, section_keys
from longspan.config.plan_section import EvalConfig
from longspan.config.sections import BestFigure, RunConfig, TrainConfig, section_kinds
from longspan.errors import ConfigError
from longspan.launch.stop_signals import NOTICES
from longspan.layout import Layout
from longspan.train.optim.schedule import Schedule

_OF_ADAMW = ("betas", "eps")


def check_numbers(config: RunConfig, *, training: bool) -> None:
    """Raise ConfigError for a number outside its bounds, and for a word in its place that is not known.

    Bounds that a key's field declares come first, of all sections and evaluation sets, then those that depend on the
    key's meaning: shares, the -1 of a default, a process's status, signals, steps counted from 1, and folders.
    """
    for section, kind in section_kinds().items():
        leave_out = _optional_keys(config, section, training=training)
        _check_bounds(getattr(config, section), kind, f"{section}.", leave_out)
    for entry in config.eval:
        _check_bounds(entry, EvalConfig, entry.prefix)
    if not 0 < config.train.memory_fraction <= 1:
        raise ConfigError(f"train.memory_fraction is {config.train.memory_fraction}; it must be above 0, at most 1")
    if config.train.min_lr_ratio > 1:
        raise ConfigError(f"train.min_lr_ratio is {config.train.min_lr_ratio}; it must be between 0 and 1")
    if -1 < config.train.router_balance_loss < 0:
        raise ConfigError(
            f"train.router_balance_loss is {config.train.router_balance_loss}; it must be at least 0, or -1 for what "
            "the model's configuration says"
        )
    if config.run.stopped_status > 255:
        raise ConfigError(f"run.stopped_status is {config.run.stopped_status}; a process ends with 0 to 255")
    names = [number.name for number in NOTICES]
    if wrong := [name for name in config.run.save_on if name not in names]:
        raise ConfigError(
            f"run.save_on has {wrong[0]!r}; it may have {', '.join(names)} (SIGINT and SIGTERM always end a run)"
        )
    if any(step < 1 for step in config.train.profile_steps):
        raise ConfigError(
            f"train.profile_steps has {min(config.train.profile_steps)}; steps are counted from 1, as in [10, 11]"
        )
    if config.train.keep_best:
        BestFigure.of(config.train.keep_best).check_sets({entry.name for entry in config.evaluations})
    if config.run.checkpoints:
        as_root(config.run.checkpoints)
    if not config.run.dir:
        raise ConfigError('run.dir is empty; name a folder, as in dir = "runs/first"')


def _optional_keys(config: RunConfig, section: str, *, training: bool) -> Collection[str]:
    """Return the keys of a section that may stand at NOT_GIVEN, so that their bounds are not checked.

    They are the learning rate where nothing is trained, and warm-up steps that follow from epochs of a corpus.
    """
    if section != "train":
        return ()
    follows_from_corpus = config.train.epochs and config.train.warmup_steps == NOT_GIVEN
    return ("warmup_steps",) * bool(follows_from_corpus) + ("lr",) * (not training)


def _check_bounds(values: Any, kind: type[Any], prefix: str, leave_out: Collection[str] = ()) -> None:
    """Raise ConfigError for the first value of a section that is outside the bound of its key, or not finite.

    Numbers of keys to leave out are not compared. A word in place of a number must be "auto", and a document needs two
    tokens.
    """
    for key, bound in ((key.name, key.bound) for key in section_keys(kind) if key.bound is not None):
        value = key_value(values, key)
        if key == "max_document_tokens" and value == 1:
            raise ConfigError(f"{prefix}{key} is 1; a document of one token predicts nothing: use 2 or more")
        if isinstance(value, str):
            if value != AUTO:
                units = {"eval_documents": "documents", "node_size": "slots", "timeout_seconds": "seconds"}
                number = f"a number of {units.get(key, 'rows')}"
                number = "a degree" if key.endswith("parallel_size") else number
                raise ConfigError(f'{prefix}{key} is {value!r}; give {number}, or "{AUTO}"')
            continue
        if key in leave_out:
            continue
        if isinstance(bound, AtLeast) and not bound.value <= value < math.inf:
            raise ConfigError(f"{prefix}{key} is {value}; it must be at least {bound.value}")
        if isinstance(bound, Above) and not bound.value < value < math.inf:
            raise ConfigError(f"{prefix}{key} is {value}; it must be above {bound.value}")


def check_parallel(config: RunConfig, home: Layout) -> None:
    """Raise ConfigError where sequence or expert parallelism does not fit the home."""
    if config.parallel.sequence_parallel and home.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel is true: it splits rows over tensor-parallel ranks, and parallel.tp is 1; "
            "use false, or a higher tp"
        )
    copy_slots = home.slots // home.dp_replicate  # over which one copy of the weights is sharded
    if copy_slots % home.ep:
        raise ConfigError(
            f"parallel.ep {home.ep} does not divide the {copy_slots} slots of each of parallel.dp_replicate "
            f"{home.dp_replicate} copies; use an ep that divides {copy_slots}, or fewer copies"
        )


def check_pipeline(config: RunConfig) -> None:
    """Raise ConfigError for virtual stages or a schedule that the pipeline does not have."""
    pp, vpp, schedule = config.parallel.pp, config.parallel.vpp, config.parallel.pipeline_schedule
    if pp == 1 and vpp > 1:
        raise ConfigError(f"parallel.vpp is {vpp} and parallel.pp is 1: virtual stages need a pipeline; use pp = 2")
    if pp == 1 and schedule != "1f1b":
        raise ConfigError(
            f'parallel.pipeline_schedule is "{schedule}" and parallel.pp is 1: there is no pipeline to schedule; use '
            "pp = 2, or leave it out"
        )
    if schedule == "zbv" and vpp != 2:
        raise ConfigError(
            f'parallel.pipeline_schedule is "zbv", which folds two stages onto each rank, and parallel.vpp is {vpp}; '
            'use vpp = 2 and pp = 2 or more, or "zero_bubble"'
        )


def check_mode(config: RunConfig) -> None:
    """Raise ConfigError for free mode where stages or exchanges of experts join slots in every layer."""
    for key in ("pp", "ep"):
        if config.context.mode == "free" and (degree := getattr(config.parallel, key)) > 1:
            raise ConfigError(
                f'context.mode is "free" and parallel.{key} is {degree}, under which all slots wait for each other in '
                f'every micro-batch; use context.mode = "lockstep", or parallel.{key} = 1'
            )


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for an optimizer or arguments that cannot train, and for steps that make no schedule.

    Where it is not AdamW without arguments, the optimizer is made once, to see whether it accepts them.
    """
    train = config.train
    if not train.epochs:  # otherwise the number of steps follows from the corpus
        Schedule.of(train)
    if not all(0 <= beta < 1 for beta in train.betas):
        raise ConfigError(f"train.betas is {list(train.betas)}; both must be at least 0 and below 1")
    for key in _OF_ADAMW:
        if train.optimizer != "adamw" and getattr(train, key) != getattr(TrainConfig(), key):
            raise ConfigError(
                f"train.{key} is {getattr(train, key)}, a key of adamw, and train.optimizer is {train.optimizer!r}; "
                f'give "{key}=…" in train.optimizer_arguments'
            )
    if train.stochastic_rounding and config.model.dtype != "bfloat16":
        raise ConfigError(
            f'train.stochastic_rounding rounds updates of parameters in bfloat16, and model.dtype is "'
            f'{config.model.dtype}"; leave it out, or use model.dtype = "bfloat16"'
        )
    if train.optimizer != "adamw" or train.optimizer_arguments:
        _try_optimizer(train)


def _try_optimizer(train: TrainConfig) -> None:
    """Raise ConfigError for an optimizer that refuses its arguments over a matrix, which every model has."""
    from torch import nn  # which --help does without

    from longspan.train.optim.optimizer import OptimizerChoice, parameter_groups

    OptimizerChoice.of(train).build(parameter_groups(nn.Linear(2, 2, bias=False), train.optimizer, train.weight_decay))

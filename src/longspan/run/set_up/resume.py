"""Resume a run: choose its checkpoint, and check that the configuration keeps its weights and documents."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from longspan.checkpoint.checkpoint import find_checkpoint
from longspan.checkpoint.files import read_state, remove_unfinished_saves
from longspan.checkpoint.store_path import checkpoints_root
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.sections import ModelConfig, RunConfig, TrainConfig
from longspan.data.stream import ORDER
from longspan.errors import CheckpointError, ConfigError
from longspan.run.run_data import RunData
from longspan.train.optim.schedule import Schedule

# What a resumed run may not change: the weights and the documents of a step would no longer be the same run's.
_FIXED_SECTIONS = ("model", "data", "lora")
# A checkpoint holds the parameters in model.dtype, and documents are the same wherever their tokens are kept.
_FREE_KEYS = ("model.compute_dtype", "model.download", "data.cache", "data.workers")
_FIXED_KEYS = ("mtp.depths", "mtp.train_whole", "mtp.weights", "train.seed", "train.tokens_per_step")
_FIXED_KEYS += ("train.optimizer", "train.optimizer_arguments")


def checkpoint_to_resume(config: RunConfig, world: World, log: LogLine) -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint that this run resumes from, with its state, or None and {}; entered by all ranks.

    Removes what unfinished saves left, and marks damaged checkpoints. Raises CheckpointError if `run.resume` does not
    allow that, where nothing good is left or documents were ordered in another way, and ConfigError for another run's.
    """
    root = checkpoints_root(Path(config.run.dir), config.run.checkpoints)
    run_on_first_rank(world, lambda: remove_unfinished_saves(root, log), CheckpointError)
    checkpoint = find_checkpoint(root, world, log, note=True)
    if checkpoint is None:
        if config.run.resume == "must":
            raise CheckpointError(
                f"run.resume is 'must' and there is no checkpoint in {root}; use 'auto' to begin a run"
            )
        return None, {}
    if config.run.resume == "never":
        raise CheckpointError(
            f"run.resume is 'never' and {checkpoint} is there; set run.dir to a new folder, or use 'auto'"
        )
    state = run_on_first_rank(world, lambda: read_state(checkpoint), CheckpointError)
    _check_same_run(config, state, checkpoint)
    return checkpoint, state


def check_steps_left(config: RunConfig, data: RunData, checkpoint: Path, state: dict[str, Any], log: LogLine) -> None:
    """Raise ConfigError for a checkpoint beyond the last step, and for a finished run under other keys.

    Under other epochs the steps so far may not end where the next one begins, which is an error too.
    """
    if state.get("step", 0) > config.train.steps:
        key = "train.epochs" if config.train.epochs else "train.steps"
        raise ConfigError(
            f"{checkpoint} is at step {state['step']}, beyond train.steps {config.train.steps}; raise {key}"
        )
    begin = data.order.begin_of_step(state["step"])
    if begin != state.get("begin"):
        raise ConfigError(
            f"under train.epochs {config.train.epochs:g} step {state['step'] + 1} does not begin where {checkpoint} "
            "ends, and some documents would be trained on once more or once less; it was "
            f"{state['config']['train']['epochs']:g} then: set it back, or set run.dir to a new folder"
        )
    if state.get("step", 0) == config.train.steps:
        _check_finished_run(*_comparable_configurations(config, state), checkpoint, log)


def rate_line(config: RunConfig, state: dict[str, Any]) -> str:
    """Return a line about a learning rate that differs from the checkpoint's schedule at the next step, or ""."""
    done = int(state["step"])
    table_before = state.get("config", {}).get("train", {})
    names = {field.name for field in fields(TrainConfig)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table_before.items() if k in names}
    train_before = TrainConfig(**values)
    rate_before, rate_now = (Schedule.of(train).lr_at(done) for train in (train_before, config.train))
    if math.isclose(rate_before, rate_now):
        return ""
    keys = ("lr", "steps", "schedule", "warmup_steps", "decay_steps", "min_lr_ratio")
    changes = [
        f"train.{key} was {value_before}"
        for key in keys
        if (value_before := getattr(train_before, key)) != getattr(config.train, key)
    ]
    return (
        f"the schedule now ends at step {config.train.steps}: lr {rate_now:.3g} at step {done + 1}, where it had "
        f"{rate_before:.3g} ({', '.join(changes)})"
    )


def _comparable_configurations(config: RunConfig, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _name_preset(state.get("config", {})), _name_preset(json.loads(json.dumps(config.tables())))


def _check_same_run(config: RunConfig, state: dict[str, Any], path: Path) -> None:
    """A key that the checkpoint lacks, or that is "auto" now, is not compared."""
    if state.get("order") != ORDER:
        raise CheckpointError(
            f"{path} was saved by a run with order {state.get('order')} of documents, and this version of longspan has "
            f"order {ORDER}: resume it with the version that saved it, or set run.dir to a new folder"
        )
    sections_before, sections_now = _comparable_configurations(config, state)
    fixed = [f"{section}.{key}" for section in _FIXED_SECTIONS for key in sections_now[section]] + list(_FIXED_KEYS)
    fixed += ["encoder.train"] if config.lora.rank else []  # with an adapter, checkpoints hold only trained parts
    for name in (name for name in fixed if name not in _FREE_KEYS):
        section, _, key = name.partition(".")
        value_before, value = sections_before.get(section, {}).get(key), sections_now[section][key]
        if value_before is not None and value not in (value_before, AUTO):
            raise ConfigError(
                f"{name} was {value_before!r} when {path} was saved and is {value!r} now; set it back, or set run.dir "
                "to a new folder"
            )


def _name_preset(config: dict[str, Any]) -> dict[str, Any]:
    # also a default preset, which may have been left out
    model = ModelConfig(**{key: config.get("model", {}).get(key, "") for key in ("preset", "path", "config")})
    return {**config, "model": {**config.get("model", {}), "preset": model.preset_name}}


def _check_finished_run(before: dict[str, Any], now: dict[str, Any], path: Path, log: LogLine) -> None:
    """Keys of the run's folder, of hosts and of evaluation may change, and so may a key that is "auto" now: it was
    replaced by a number before.
    """
    changes = {
        (section, key): f"{section}.{key} was {before[section][key]!r} and is {value!r} now"
        for section in sorted(now.keys() & before.keys() - {"run", "eval"})
        for key, value in sorted(now[section].items())
        if key in before[section] and key != "node_size" and value not in (before[section][key], AUTO)
    }
    evaluated = [changes.pop(name) for name in list(changes) if name[1].startswith("eval_")]
    if now["eval"] != before.get("eval", []):
        evaluated.append(f"the evaluation sets are {', '.join(entry['name'] for entry in now['eval']) or 'none'} now")
    if changes:
        raise ConfigError(
            f"the run has come to its end at step {now['train']['steps']} ({path}), and nothing is left to train: "
            f"{'; '.join(changes.values())}. Set them back to see the run, raise train.steps to train on with them, "
            "or set run.dir to a new folder"
        )
    evaluated_text = f", evaluated as is asked for now ({'; '.join(evaluated)})" if evaluated else ""
    log(f"the run has come to its end: it is shown{evaluated_text}; its config.toml and what is in metrics.jsonl stay")

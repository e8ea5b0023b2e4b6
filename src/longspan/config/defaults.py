"""The values of keys that are not given: the demo's with a tiny preset, otherwise those of a model of one's own.

`load_config` and the flags of `longspan train` end here, so that every value is in a RunConfig, and in a run's
config.toml. `run/checks.py` checks which values are possible. torch is imported only for a dtype.
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from longspan.config.dtypes import DTYPE_BYTES
from longspan.config.keys import AUTO, NOT_GIVEN, key_value, with_key_values
from longspan.config.local_folders import STDLIB, absolute_path
from longspan.config.plan_section import EvalConfig, inherit_keys
from longspan.config.sections import EncoderSection, ModelConfig, RunConfig, held_out_set
from longspan.errors import LongspanError, PlanError, plural
from longspan.model.presets import PRESETS, find_published_preset
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import has_mixers

TINY = "-tiny"  # how the names of the demo's presets end

# The demo: a model with random weights that learns something in a few minutes on CPUs.
_DEMO: dict[str, Any] = {
    "model.preset": "qwen3-tiny",
    "data.max_document_tokens": 2048,
    "context.planner": "fixed",
    "context.cp_comm_type": "p2p",
    "context.partition": "zigzag",
    "evaluation.planner": "fixed",
    "evaluation.cp_comm_type": "p2p",
    "evaluation.max_tokens_per_slot": 2048,
    "train.tokens_per_step": 4096,
    "optimizer.lr": 6e-3,
    "optimizer.warmup_steps": 100,
}
# One's own model: nothing is cut, and a slot takes what its memory holds. Of optimizer.lr there is no default.
_OWN_MODEL: dict[str, Any] = {
    "data.max_document_tokens": 0,
    "context.planner": AUTO,
    "context.context_parallel_size": 0,
    "context.cp_comm_type": AUTO,
    "context.partition": "zigzag",
    "context.max_tokens_per_slot": AUTO,
    "train.tokens_per_step": 65536,
}
STEPS = 300  # where neither steps nor epochs follow from other keys
# Adapters take about ten times what all weights take.
LORA_LR = 2e-4
# TRL's losses of preferences have 1e-6 for all weights.
PREFERENCE_LORA_LR = 5e-6
MOST_WARMUP = 100  # steps; a twentieth of all where that is less


def is_demo(model: ModelConfig) -> bool:
    """Return whether a model is the demo's: random weights of a tiny preset."""
    return model.preset_name.endswith(TINY)


def resolve_defaults(config: RunConfig, ranks: int = 4) -> RunConfig:
    """Return the configuration with a value for every key that is not given; only `optimizer.lr` of a model of one's
    own has no default.

    The demo's degrees suit the number of `ranks`. Defaults that follow from other keys come before those of the tables
    (_DEMO, _OWN_MODEL), as the first that is set stays; evaluation comes last, as its keys take training's values.

    >>> resolve_defaults(RunConfig()).optimizer.lr
    0.006
    """
    # 1. What follows from other keys.
    if config.evaluation.context_parallel_size == AUTO:
        config = _with_defaults(config, {"evaluation.cp_comm_type": AUTO})
    if config.evaluation.patience:
        config = _with_defaults(config, {"checkpoint.keep_best": "eval_loss"})
    if config.lora.rank:
        config = _with_defaults(config, {"optimizer.lr": PREFERENCE_LORA_LR if config.train.loss else LORA_LR})
    config = _with_defaults(config, {"encoder.trainable": encoder_default(config)})
    if config.model.dtype == AUTO:
        config = config.with_keys("model", dtype=_default_dtype(config))
    if not config.data.sources:
        config = _with_defaults(config, {"data.path": STDLIB})
    config = _with_partitions(config)
    if config.context.planner in (NOT_GIVEN, AUTO) and (planner := config.context.planner_of_degrees):
        config = config.with_keys("context", planner=planner)
    if config.evaluation.context_parallel_size == NOT_GIVEN and config.evaluation.planner_of_degrees == "dynamic":
        config = _with_defaults(config, {"evaluation.planner": "dynamic"})
    # 2. The tables. The demo has degree 2, in evaluation 4, or less where these do not divide the slots.
    if is_demo(config.model):
        slots = ranks // max(1, config.parallel.tp * config.parallel.pp)
        training_degree = 0 if config.context.planner == AUTO else math.gcd(2, slots)
        degrees = {
            "context.context_parallel_size": training_degree,
            "evaluation.context_parallel_size": math.gcd(4, slots),
        }
        config = _with_defaults(config, degrees | _DEMO)
        rows = max(1024, 2048 // max(1, config.context.context_parallel_size))
        config = _with_defaults(config, {"context.max_tokens_per_slot": rows})
    else:
        config = _with_defaults(config, _OWN_MODEL)
    # 3. One epoch where a model's folder meets one source of data, else STEPS; of epochs the corpus decides the steps.
    train = config.train
    if config.model.path and len(config.data.sources) < 2 and train.steps == NOT_GIVEN and not train.epochs:
        config = config.with_keys("train", epochs=1.0)
    if not config.train.epochs:
        config = _with_defaults(config, {"train.steps": STEPS})
        if not is_demo(config.model):
            config = with_steps(config, config.train.steps)
    # 4. Evaluation, and then its sets.
    config = replace(config, evaluation=inherit_keys(config.evaluation, config.context, config.context))
    parent = held_out_set(config)
    sets = list[EvalConfig]()
    for entry in config.evaluation.sets:
        keys = [key for key in ("max_document_tokens", "every") if getattr(entry, key) == NOT_GIVEN]
        filled = replace(entry, **{key: getattr(parent, key) for key in keys})
        sets.append(inherit_keys(filled, config.evaluation, config.context))
    return config.with_sets(sets)


def encoder_default(config: RunConfig) -> Literal["all", "none"]:
    """Return what of an encoder is trained where encoder.trainable is not given."""
    return "none" if config.lora.rank else "all"


def encoder_is_given(config: RunConfig) -> bool:
    """Return whether [encoder] has keys that were given, and not only its defaults and the resolved `trainable`."""
    return config.encoder not in (EncoderSection(), EncoderSection(trainable=encoder_default(config)))


def source_dtype(model: ModelConfig) -> str:
    """Return the dtype that a model's config.json names, or in which a preset's weights are published; "" if neither
    is known.
    """
    source = model.source
    preset = find_published_preset(source) if source else model.preset_name
    if preset or not source:
        return PRESETS[preset].dtype if preset in PRESETS else ""
    try:
        read = ConfigReader.read_whole_model(source)
    except PlanError:
        return ""
    names = ("dtype", "torch_dtype")
    name = read.value(*names) or read.section("text_config").value(*names)
    return str(name or "").removeprefix("torch.")


def _default_dtype(config: RunConfig) -> str:
    """An encoder that is trained beside an adapter has model.dtype too, and would lose small updates in bfloat16."""
    if not config.lora.rank or config.encoder.trainable != "none":
        return "float32"
    dtype = _dtype_of_begun_run(config) or source_dtype(config.model)
    computes = config.model.compute_dtype in (AUTO, dtype)
    return dtype if computes and dtype in DTYPE_BYTES else "float32"


def _dtype_of_begun_run(config: RunConfig) -> str:
    """The dtype is "" without such a run. A file that cannot be read is none here: a run that goes on refuses it, or
    is compared with its checkpoint, later."""
    model = config.model
    try:
        tables = tomllib.loads(Path(config.run.dir, "config.toml").read_text(encoding="utf-8"))
        keys = tables["model"]
        begun = ModelConfig(**{key: keys.get(key, "") for key in ("path", "config", "preset")})
        names = (begun.source, begun.preset_name), (absolute_path(model.source), model.preset_name)
        # A file without the key is of a run that began when float32 was the default.
        return keys.get("dtype", "float32") if tables["lora"]["rank"] and names[0] == names[1] else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LongspanError):
        return ""


def is_hybrid(model: ModelConfig) -> bool:
    """Return whether a model has state-space layers, by its preset or config.json; false if that cannot be read."""
    try:
        return has_mixers(Path(model.source) if model.source else PRESETS[model.preset_name].values)
    except (LongspanError, KeyError):
        return False


def _with_partitions(config: RunConfig) -> RunConfig:
    """For a model without state-space layers a partition "auto" is zigzag. For a hybrid it is "auto" by default, and
    with it the type: both are chosen together later. Under zigzag that is given, a hybrid's default type is p2p."""
    if not is_hybrid(config.model):
        partition = "zigzag" if config.context.partition == AUTO else config.context.partition
        return config.with_keys("context", partition=partition)
    config = _with_defaults(config, {"context.partition": AUTO})
    if config.context.partition != "zigzag":
        config = _with_defaults(config, {"context.cp_comm_type": AUTO})
    config = _with_defaults(config, {"context.cp_comm_type": "p2p"})
    return _with_defaults(config, {"evaluation.cp_comm_type": config.context.cp_comm_type})


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    """Return the configuration with these steps and, if no warm-up is given, a twentieth of them as its warm-up, at
    most MOST_WARMUP.
    """
    config = config.with_keys("train", steps=steps)
    return _with_defaults(config, {"optimizer.warmup_steps": min(MOST_WARMUP, steps // 20)})


def _with_defaults(config: RunConfig, defaults: Mapping[str, Any]) -> RunConfig:
    for name, value in defaults.items():
        section, _, key = name.partition(".")
        values = getattr(config, section)
        if key_value(values, key) in (NOT_GIVEN, ""):
            config = replace(config, **{section: with_key_values(values, {key: value})})
    return config


def warn_about_small_updates(config: RunConfig, log: Callable[[str], None]) -> None:
    """Log a caution where a warm-up does not end before the run, and one where bfloat16 weights lose small updates to
    rounding.
    """
    warmup = config.optimizer.warmup_steps
    steps = config.train.steps
    if warmup >= steps > 0:
        log(
            f"caution: optimizer.warmup_steps {warmup} is not below the {plural(steps, 'step')} of the run: the "
            f"learning rate rises to the end, to {steps / warmup:.0%} of optimizer.lr"
        )
    if config.model.dtype == "bfloat16" and not config.optimizer.stochastic_rounding and not config.lora.rank:
        log(
            'caution: model.dtype is "bfloat16": updates below 1/512 of a weight are rounded away, and so the model '
            'learns less (docs/precision.md); use model.dtype = "float32" with model.compute_dtype = "bfloat16", or '
            "optimizer.stochastic_rounding = true"
        )

"""What keys mean that were not given: the demo's values with a tiny preset, otherwise those of one's own model.

`load_config` and the flags of `longspan train` end here, so that whatever reads a RunConfig finds every value in it, as
does a reader of a run's config.toml. Which values are possible is `config_check.py`'s business. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from longspan.config.bounds import AUTO, NOT_GIVEN
from longspan.config.eval_inheritance import set_with_defaults
from longspan.config.sections import ContextConfig, ModelConfig, RunConfig
from longspan.errors import LongspanError
from longspan.model.presets import PRESETS
from longspan.plan.cost.model_shape import has_mixers
from longspan.plan.hierarchy import levels_at

STDLIB = "stdlib"  # as data.path
TINY = "-tiny"  # how the names of the demo's presets end

# The demo: a model with random weights that learns something in two minutes on CPUs.
_DEMO: dict[str, Any] = {
    "model.preset": "qwen3-tiny",
    "data.max_document_tokens": 2048,
    "context.context_parallel_size": 2,
    "context.cp_comm_type": "p2p",
    "context.partition": "zigzag",
    "context.max_tokens_per_slot": 1024,
    "context.eval_planner": "fixed",
    "context.eval_context_parallel_size": 4,
    "context.eval_cp_comm_type": "p2p",
    "context.eval_partition": "zigzag",
    "context.eval_max_tokens_per_slot": 2048,
    "context.eval_hierarchical_context_parallel_sizes": (2, 2),
    "train.tokens_per_step": 4096,
    "train.lr": 6e-3,
    "train.warmup_steps": 100,
}
# One's own model: nothing is cut, and a slot takes what its memory holds. Of train.lr there is no default.
_OWN_MODEL: dict[str, Any] = {
    "data.max_document_tokens": 0,
    "context.context_parallel_size": 1,
    "context.cp_comm_type": "p2p",
    "context.partition": "zigzag",
    "context.max_tokens_per_slot": AUTO,
    "train.tokens_per_step": 65536,
}
LORA_LR = 2e-4  # of adapters, about ten times what all weights take
_SHOWN = {
    "train": ("steps", "tokens_per_step", "lr", "warmup_steps", "eval_every", "save_every", "save_minutes"),
    "data": ("max_document_tokens", "eval_documents"),
    "context": ("planner", "context_parallel_size", "cp_comm_type", "partition", "max_tokens_per_slot"),
}
MOST_WARMUP = 100  # steps; a twentieth of all where that is less


def is_demo(model: ModelConfig) -> bool:
    """Whether a model is the demo's: random weights of a tiny preset."""
    return model.preset_name.endswith(TINY)


def resolved(config: RunConfig) -> RunConfig:
    """The configuration with a value for every key that was not given, but for a `train.lr` that has to be.

    >>> resolved(RunConfig()).train.lr
    0.006
    >>> resolved(resolved(config)) == resolved(config)
    True
    """
    if config.context.eval_context_parallel_size == AUTO:
        config = _with_defaults(config, {"context.eval_cp_comm_type": AUTO})
    if config.lora.rank:
        config = _with_defaults(config, {"train.lr": LORA_LR})
    config = _with_defaults(config, {"encoder.train": encoder_default(config)})
    if config.data.pack_to:
        config = _with_defaults(config, {"data.max_document_tokens": 0})
    if not config.data.sources:
        config = _with_defaults(config, {"data.path": STDLIB})
    config = _with_partition(config)
    config = _with_defaults(config, _DEMO if is_demo(config.model) else _OWN_MODEL)
    if not is_demo(config.model):
        config = _with_defaults(config, _as_in_training(config.context))
        config = config if config.train.epochs else with_steps(config, config.train.steps)
    context = config.context
    if context.eval_context_parallel_size == 0:
        context = replace(context, eval_context_parallel_size=context.context_parallel_size)
    if context.eval_max_tokens_per_slot == AUTO:
        context = replace(context, eval_max_tokens_per_slot=context.max_tokens_per_slot)
    config = replace(config, context=context)
    return replace(config, eval=tuple(set_with_defaults(entry, config) for entry in config.eval))


def encoder_default(config: RunConfig) -> Literal["all", "none"]:
    """What of an encoder is trained where nothing is said: nothing beside adapters, which alone are trained."""
    return "none" if config.lora.rank else "all"


def is_hybrid(model: ModelConfig) -> bool:
    """Whether a model has state-space layers, as its preset or its config.json says; not where none can be read."""
    try:
        return has_mixers(Path(model.source) if model.source else PRESETS[model.preset_name].values)
    except (LongspanError, KeyError):
        return False


def _with_partition(config: RunConfig) -> RunConfig:
    """Hybrids are dealt out as their cost says, and so are their evaluations; of other models "auto" means zigzag."""
    context = config.context
    if not is_hybrid(config.model):
        words = ("partition", "eval_partition")
        zigzag = {word: "zigzag" for word in words if getattr(context, word) == AUTO}
        entries = tuple(replace(s, partition="zigzag") if s.partition == AUTO else s for s in config.eval)
        return replace(config, context=replace(context, **zigzag), eval=entries)
    config = _with_defaults(config, {"context.partition": AUTO})
    if config.context.partition != "zigzag":
        config = _with_defaults(config, {"context.cp_comm_type": AUTO})
    config = _with_defaults(config, {"context.cp_comm_type": "p2p"})
    context = config.context
    return _with_defaults(
        config, {"context.eval_partition": context.partition, "context.eval_cp_comm_type": context.cp_comm_type}
    )


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    """The configuration with so many steps, and the warm-up that follows from them where none was given."""
    config = replace(config, train=replace(config.train, steps=steps))
    return _with_defaults(config, {"train.warmup_steps": min(MOST_WARMUP, steps // 20)})


def _with_defaults(config: RunConfig, defaults: Mapping[str, Any]) -> RunConfig:
    """The configuration with these values of "section.key" where none was given."""
    for name, value in defaults.items():
        section, _, key = name.partition(".")
        values = getattr(config, section)
        if getattr(values, key) in (NOT_GIVEN, ""):
            config = replace(config, **{section: replace(values, **{key: value})})
    return config


def _as_in_training(context: ContextConfig) -> dict[str, Any]:
    """What makes evaluation plan as training does, of every key of it.

    A degree that was given alone, or "auto", makes plans of one degree, also where training plans are dynamic. Levels
    of plans at another degree keep what divides it.
    """
    planner, degree, sizes = context.planner, context.context_parallel_size, context.hierarchical_context_parallel_sizes
    eval_degree = context.eval_context_parallel_size
    if isinstance(eval_degree, str):
        planner = "fixed"
    elif eval_degree > 0:
        planner, degree = "padded" if planner == "padded" else "fixed", eval_degree
    levels_fit = (planner, degree) == (context.planner, context.context_parallel_size)
    if (context.eval_planner or planner) != "dynamic" and not levels_fit:
        sizes = levels_at(sizes, degree)
    return {
        "context.eval_planner": planner,
        "context.eval_context_parallel_size": degree,
        "context.eval_cp_comm_type": context.cp_comm_type,
        "context.eval_partition": context.partition,
        "context.eval_max_tokens_per_slot": context.max_tokens_per_slot,
        "context.eval_hierarchical_context_parallel_sizes": sizes,
    }


def settings_line(config: RunConfig) -> str:
    """The values that decide most about a run, given or not, in one line; of evaluation, what is not as in training."""
    shown = _SHOWN
    if config.train.epochs:  # from which steps and warm-up follow, once the corpus is known
        rest = tuple(key for key in _SHOWN["train"] if key not in ("steps", "warmup_steps"))
        shown = _SHOWN | {"train": ("epochs", *rest)}
    words = [
        f"[{section}] {', '.join(f'{key} = {_text(getattr(getattr(config, section), key))}' for key in keys)}"
        for section, keys in shown.items()
    ]
    if config.lora.rank:
        words.append(f"[lora] rank = {config.lora.rank}, alpha = {config.lora.alpha or 2 * config.lora.rank:g}")
    if config.mtp.depths:
        words.append(f"[mtp] depths = {config.mtp.depths}, loss_weight = {config.mtp.loss_weight:g}")
    context = config.context
    keys = {key: f"eval_{key}" for key in _SHOWN["context"]}
    other = [
        f"{key} = {_text(getattr(context, key))}"
        for trained, key in keys.items()
        if getattr(context, trained) != getattr(context, key)
    ]
    return "; ".join([*words, ", ".join(other) or "evaluation as in training"])


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

"""Whether the values of a configuration fit together and fit the ranks. Runs before any process group exists.

What needs the data or the model (a document that is too long, a list of types as long as the layers) is checked by
the run once it has them, still before the first collective of a step.
"""

import math
from dataclasses import asdict

from longspan.errors import ConfigError, counted
from longspan.layout import Layout
from longspan.model import PRESETS
from longspan.plan.check import COMM_TYPES
from longspan.train.config.file import nearest
from longspan.train.config.precision import check_precision
from longspan.train.config.sections import AUTO, NOT_GIVEN, Above, AtLeast, RunConfig, bounds_of_keys
from longspan.train.loggers.logger import check_loggers
from longspan.train.plans import PlanChoice, home_of
from longspan.train.run.optimizer_check import check_optimizer

_EXPERT_PRESETS = "qwen3-moe-tiny or gpt-oss-tiny (8 experts)"


def check_config(config: RunConfig, ranks: int, *, training: bool = True) -> Layout:
    """The home of the run on `ranks` ranks, if every value is possible there.

    Without `training` (of a run that is only evaluated) what plans its training steps is left aside.
    Raises ConfigError (LayoutError for ranks that tp x pp does not divide) with the key, the numbers and what fits.
    """
    _check_model(config, training=training)
    _check_numbers(config, training=training)
    home = home_of(config.parallel, ranks)
    check_precision(config)
    _check_parallel(config, home)
    _check_memory(config)
    _check_pipeline(config)
    _check_mode(config)
    check_optimizer(config)
    _check_kernel(config)
    for choice in _choices(config, training=training):
        _check_types(choice)
        if choice.planner != "dynamic":
            _check_degree(choice, home)
        longest = config.data.max_document_tokens or 1
        choice.check(longest, home, f"data.max_document_tokens {longest}")
    _check_preset(config)
    if training:
        check_loggers(config.run.loggers)
    return home


def _check_numbers(config: RunConfig, *, training: bool) -> None:
    values = {f"{section}.{key}": v for section, keys in asdict(config).items() for key, v in keys.items()}
    for key in ("context.max_tokens_per_slot", "context.eval_max_tokens_per_slot"):
        if isinstance(cap := values[key], str):
            if cap != AUTO:
                raise ConfigError(f'{key} is {cap!r}; give a number of rows, or "{AUTO}"')
            values[key] = 0
    if not 0 < values["train.memory_fraction"] <= 1:
        raise ConfigError(f"train.memory_fraction is {values['train.memory_fraction']}; it must be above 0, at most 1")
    if config.train.epochs and values["train.warmup_steps"] == NOT_GIVEN:
        values["train.warmup_steps"] = 0  # it follows from the steps, which follow from the corpus
    for key, bound in bounds_of_keys().items():
        if key == "train.lr" and not training:
            continue
        if isinstance(bound, AtLeast) and not bound.value <= values[key] < math.inf:
            raise ConfigError(f"{key} is {values[key]}; it must be at least {bound.value}")
        if isinstance(bound, Above) and not bound.value < values[key] < math.inf:
            raise ConfigError(f"{key} is {values[key]}; it must be above {bound.value}")
    if config.train.min_lr_ratio > 1:
        raise ConfigError(f"train.min_lr_ratio is {config.train.min_lr_ratio}; it must be between 0 and 1")
    if -1 < config.train.router_balance_loss < 0:
        raise ConfigError(
            f"train.router_balance_loss is {config.train.router_balance_loss}; it must be at least 0, or -1 for what "
            "the model's configuration says"
        )
    if config.data.max_document_tokens == 1:
        raise ConfigError("data.max_document_tokens is 1; a document of one token predicts nothing: use 2 or more")
    if config.run.stopped_status > 255:
        raise ConfigError(f"run.stopped_status is {config.run.stopped_status}; a process ends with 0 to 255")
    if not config.run.dir:
        raise ConfigError('run.dir is empty; name a folder, as in dir = "runs/first"')


def _check_model(config: RunConfig, *, training: bool) -> None:
    model = config.model
    named = [key for key in ("path", "config", "preset") if getattr(model, key)]
    if len(named) > 1:
        raise ConfigError(
            f"{' and '.join(f'model.{key} = {getattr(model, key)!r}' for key in named)} name more than one model; keep "
            "path to train a folder's weights, config for random weights of a configuration, or preset"
        )
    if model.preset_name and model.preset_name not in PRESETS:
        raise ConfigError(f"model.preset is {model.preset!r}; {nearest(model.preset, PRESETS)}")
    if training and config.train.lr == NOT_GIVEN:
        raise ConfigError(
            f"train.lr is not given, and {model.path or model.config or model.preset} has no default; give --train.lr: "
            "often 1e-6 to 2e-5 to train weights on, 1e-4 to 1e-3 from random ones"
        )
    if model.rope_scaling == "dynamic":
        raise ConfigError(
            'model.rope_scaling is "dynamic", which chooses frequencies by the longest position of a batch at run '
            'time: a document\'s loss would depend on its neighbours; use "yarn" or "linear"'
        )
    if model.rope_scaling and model.rope_scaling not in (known := ("yarn", "linear")):
        raise ConfigError(f"model.rope_scaling is {model.rope_scaling!r}; {nearest(model.rope_scaling, known)}")
    if model.rope_factor and not model.rope_scaling:
        raise ConfigError(f'model.rope_factor is {model.rope_factor:g} and model.rope_scaling is empty; use "yarn"')
    if 0 < model.rope_factor <= 1:
        raise ConfigError(f"model.rope_factor is {model.rope_factor:g}; it must be above 1, or 0 to be chosen")


def _check_parallel(config: RunConfig, home: Layout) -> None:
    if config.parallel.sequence_parallel and home.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel is true: it splits rows over tensor-parallel ranks, and parallel.tp is 1; "
            "use false, or a higher tp"
        )
    width = home.slots // home.dp_replicate
    if width % home.ep:
        raise ConfigError(
            f"parallel.ep {home.ep} does not divide the {width} slots of each of parallel.dp_replicate "
            f"{home.dp_replicate} copies; use an ep that divides {width}, or fewer copies"
        )


def _check_kernel(config: RunConfig) -> None:
    if not (name := config.context.attention_kernel):
        return
    from longspan.attention import KERNELS  # brings torch, which --help does without

    names = [kernel.name for kernel in KERNELS]
    if name not in names:
        raise ConfigError(f"context.attention_kernel is {name!r}; {nearest(name, names)}")


def _check_memory(config: RunConfig) -> None:
    if config.train.recompute_layers and config.train.activation_checkpointing == "none":
        raise ConfigError(
            f"train.recompute_layers is {config.train.recompute_layers}: it says how many layers are recomputed, and "
            'train.activation_checkpointing is "none"; use "full" or "selective", or 0 layers'
        )
    if config.train.offload_activations and config.train.activation_checkpointing == "none":
        raise ConfigError(
            "train.offload_activations is true: it moves what checkpointed layers keep, and "
            'train.activation_checkpointing is "none"; use "full" or "selective"'
        )


def _check_mode(config: RunConfig) -> None:
    """Stages and exchanges of experts join slots in every layer, whatever their groups."""
    for key in ("pp", "ep"):
        if config.context.mode == "free" and (degree := getattr(config.parallel, key)) > 1:
            raise ConfigError(
                f'context.mode is "free" and parallel.{key} is {degree}, under which all slots wait for each other in '
                f'every micro-batch; use context.mode = "lockstep", or parallel.{key} = 1'
            )


def _check_pipeline(config: RunConfig) -> None:
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


def _check_preset(config: RunConfig) -> None:
    """What a preset's sizes do not allow, before a corpus is read; a model's folder is checked once it is loaded."""
    if not (name := config.model.preset_name):
        return
    parallel, values = config.parallel, PRESETS[name].values
    layers, heads = values["num_hidden_layers"], values["num_key_value_heads"]
    experts = values.get("num_experts", values.get("num_local_experts", 0))
    if (stages := parallel.pp * parallel.vpp) > layers:
        raise ConfigError(
            f"parallel.pp {parallel.pp} x parallel.vpp {parallel.vpp} make {stages} pipeline stages, and "
            f"model.preset {name!r} has {layers} layers, at least one for each; use fewer stages, or a model of more "
            "layers (qwen3-deep-tiny has 4)"
        )
    if heads % parallel.tp:
        raise ConfigError(
            f"parallel.tp {parallel.tp} does not divide the {heads} key/value heads of model.preset {name!r}; use "
            f"{' or '.join(str(tp) for tp in range(1, heads + 1) if heads % tp == 0)}"
        )
    if parallel.ep > 1 and (not experts or experts % parallel.ep):
        lack = f"does not divide the {experts} experts" if experts else "deals out experts, there are none"
        raise ConfigError(f"parallel.ep {parallel.ep} {lack} of model.preset {name!r}; use {_EXPERT_PRESETS}, or ep 1")
    if not experts and max(config.train.router_balance_loss, config.train.router_z_loss) > 0:
        raise ConfigError(
            f"train.router_balance_loss is {config.train.router_balance_loss} and train.router_z_loss is "
            f"{config.train.router_z_loss}, and model.preset {name!r} has no routers; use {_EXPERT_PRESETS}, or 0"
        )


def _check_types(choice: PlanChoice) -> None:
    for kind in choice.comm_types:
        if kind not in COMM_TYPES:
            raise ConfigError(f"{choice.comm_type_key} is {kind!r}; {nearest(kind, COMM_TYPES)}")


def _check_degree(choice: PlanChoice, home: Layout) -> None:
    if home.slots % choice.degree == 0:
        return
    fit = [d for d in range(1, home.slots + 1) if home.slots % d == 0]
    ranks = choice.degree * home.tp * home.pp
    raise ConfigError(
        f"{choice.degree_key} {choice.degree} does not divide {counted(home.slots, 'slot')} "
        f"({counted(len(home.ranks), 'rank')} / tp {home.tp} / pp {home.pp}); "
        f"use {' or '.join(map(str, fit))}, or start a multiple of {ranks} processes (--world {ranks}, or torchrun)"
    )


def _choices(config: RunConfig, *, training: bool, heads: int | None = None) -> list[PlanChoice]:
    """The halves of [context] that will be used; a preset's query heads are known, a model folder's once it is read."""
    if heads is None and config.model.preset_name:
        heads = PRESETS[config.model.preset_name].values["num_attention_heads"]
    choices = [PlanChoice.training(config, heads=heads)] if training else []
    evaluated = config.data.eval_documents > 0 or not training
    return choices + ([PlanChoice.evaluation(config, heads=heads)] if evaluated else [])


def check_longest(config: RunConfig, home: Layout, longest: int, name: str, heads: int | None = None) -> None:
    """Raise ConfigError where the longest document of the corpus (of source file `name`) fits no slot group.

    `heads` are the query heads of a model from a folder, which its communication type may not deal out to a group.
    """
    for choice in _choices(config, training=True, heads=heads):
        try:
            choice.check(longest, home, f"the longest document ({longest} tokens, of {name})")
        except ConfigError as error:
            if not choice.options.max_tokens_per_slot:
                raise
            raise ConfigError(f"{error}. {_room_for(longest, choice, home)}") from error


def _room_for(longest: int, choice: PlanChoice, home: Layout) -> str:
    """What would take a document: all slots together, by which key, and what cuts it."""
    wider = ""
    if choice.planner != "dynamic" and choice.degree < home.slots:
        wider = f' ({choice.degree_key} = {home.slots} or {choice.prefix}planner = "dynamic")'
    elif choice.planner == "dynamic" and 0 < choice.max_degree < home.slots:
        wider = " (context.max_dynamic_context_parallel_size = 0)"
    rows = f"{-(-longest // home.slots):,} rows of each of all {counted(home.slots, 'slot')}"
    return f"It needs {rows}{wider}; data.max_document_tokens cuts longer texts"

"""Whether [parallel] fits the home, and what works with a pipeline, with experts, with recomputation."""

from longspan.config.sections import RunConfig
from longspan.errors import ConfigError
from longspan.layout import Layout


def check_parallel(config: RunConfig, home: Layout) -> None:
    """Raise ConfigError where sequence or expert parallelism does not fit the home."""
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


def check_memory(config: RunConfig) -> None:
    """Raise ConfigError for keys of recomputation where nothing is recomputed."""
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


def check_mode(config: RunConfig) -> None:
    """Raise ConfigError for free mode where stages or exchanges of experts join slots in every layer."""
    for key in ("pp", "ep"):
        if config.context.mode == "free" and (degree := getattr(config.parallel, key)) > 1:
            raise ConfigError(
                f'context.mode is "free" and parallel.{key} is {degree}, under which all slots wait for each other in '
                f'every micro-batch; use context.mode = "lockstep", or parallel.{key} = 1'
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

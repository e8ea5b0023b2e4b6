"""Whether the keys of [lora] fit each other and the rest of a run; names of targets are checked with the model."""

from longspan.config.sections import LoraSection, RunConfig
from longspan.config.sections.lora import PARTS, PROJECTOR, TOWER
from longspan.errors import ConfigError

TOWER_PARTS = frozenset((PROJECTOR, TOWER))


def check_lora(config: RunConfig) -> None:
    """Raise ConfigError for adapters that cannot be trained so, and for keys of adapters that are not there."""
    lora = config.lora
    if not lora.rank:
        if lora != LoraSection():
            raise ConfigError(
                f"[lora] has alpha {lora.alpha:g}, dropout {lora.dropout:g}, targets {list(lora.targets)} and parts "
                f"{list(lora.parts)}, and lora.rank is 0: there is no adapter; set lora.rank = 16, say, or leave them "
                "out"
            )
        return
    _check_parts(config)
    if lora.dropout >= 1:
        raise ConfigError(f"lora.dropout is {lora.dropout:g}; it must be below 1")
    if lora.dropout and TOWER_PARTS & {*lora.parts} and config.encoder.tp > 1:
        raise ConfigError(
            f"lora.dropout is {lora.dropout:g} and encoder.tp is {config.encoder.tp}: tensor-parallel ranks would drop "
            "different inputs of the same rows; set lora.dropout = 0.0, or encoder.tp = 1"
        )
    if lora.dropout and config.parallel.tp > 1:
        raise ConfigError(
            f"lora.dropout is {lora.dropout:g} and parallel.tp is {config.parallel.tp}: tensor-parallel ranks would "
            "drop different inputs of the same rows; set lora.dropout = 0.0, or parallel.tp = 1"
        )
    if config.train.stochastic_rounding:
        raise ConfigError(
            "train.stochastic_rounding rounds updates of bfloat16 parameters, and adapters (lora.rank) are float32 "
            "over a bfloat16 model too; leave it out"
        )


def _check_parts(config: RunConfig) -> None:
    """Raise ConfigError for parts that no model has, and for those that [encoder] trains whole."""
    parts = config.lora.parts
    if not parts or not {*parts} <= {*PARTS} or len({*parts}) < len(parts):
        raise ConfigError(f"lora.parts is {list(parts)}; name some of {', '.join(PARTS)}, each once")
    train = config.encoder.train
    whole = {"all": (PROJECTOR, TOWER), "projector": (PROJECTOR,)}.get(train, ())
    if both := [part for part in parts if part in whole]:
        raise ConfigError(
            f"lora.parts has {both[0]!r}, and encoder.train is {train!r}, which trains its weights whole; leave one out"
        )

"""Whether the keys of [mtp] fit each other and the rest of a run; which weights a folder has is checked with it."""

from pathlib import Path

from longspan.config.bounds import AUTO
from longspan.config.sections import RunConfig
from longspan.config.sections.mtp import RANDOM, MtpSection
from longspan.errors import ConfigError


def check_mtp_section(config: RunConfig) -> None:
    """Raise ConfigError for depths of multi-token prediction that cannot be trained so, and for keys of none."""
    mtp = config.mtp
    if not mtp.depths:
        if mtp != MtpSection():
            raise ConfigError(
                f"[mtp] has loss_weight {mtp.loss_weight:g}, weights {mtp.weights!r} and train_whole "
                f"{str(mtp.train_whole).lower()}, and mtp.depths is 0: there is no multi-token prediction; set "
                "mtp.depths = 1, say, or leave them out"
            )
        return
    if mtp.train_whole and not config.lora.rank:
        raise ConfigError(
            "mtp.train_whole is true: it trains depths whole beside adapters, and lora.rank is 0, so that all weights "
            "are trained; leave it out, or set lora.rank = 16, say"
        )
    if mtp.weights not in (AUTO, RANDOM) and not Path(mtp.weights).is_dir():
        raise ConfigError(
            f"mtp.weights is {mtp.weights!r}, which is no folder; name one with weights of depths, {AUTO!r} or "
            f"{RANDOM!r}"
        )

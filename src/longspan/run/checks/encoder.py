"""Whether the keys of [encoder] fit the rest of a run; that data has images is known once the corpus is there."""

from longspan.config.defaults import encoder_default
from longspan.config.sections import EncoderSection, RunConfig
from longspan.errors import ConfigError, counted
from longspan.layout import Layout
from longspan.run.checks.lora import TOWER_PARTS


def adapted_parts(config: RunConfig) -> list[str]:
    """The parts of an encoder that get an adapter."""
    return [part for part in config.lora.parts if config.lora.rank and part in TOWER_PARTS]


def check_encoder(config: RunConfig, home: Layout) -> None:
    """Raise ConfigError for an encoder that cannot be trained so."""
    encoder = config.encoder
    if len(home.ranks) % encoder.tp:
        fit = ", ".join(str(tp) for tp in range(1, len(home.ranks) + 1) if len(home.ranks) % tp == 0)
        are = "is" if len(home.ranks) == 1 else "are"
        raise ConfigError(f"encoder.tp is {encoder.tp}, and there {are} {counted(len(home.ranks), 'rank')}; use {fit}")
    if encoder.train == "none" and encoder.lr and not adapted_parts(config):
        raise ConfigError(f'encoder.lr is {encoder.lr:g} and encoder.train is "none"; leave out one of them')


def check_images(config: RunConfig, images: int) -> None:
    """Raise ConfigError where [encoder], or an adapter of it, is given and the data has no images."""
    if not images and (parts := adapted_parts(config)):
        raise ConfigError(
            f"lora.parts has {', '.join(parts)}, and no row of the data has images; leave it out, or give rows with "
            "images (docs/multimodal.md)"
        )
    if not images and config.encoder not in (EncoderSection(), EncoderSection(train=encoder_default(config))):
        raise ConfigError(
            "[encoder] is given, and no row of the data has images; leave it out, or give rows with images "
            "(docs/multimodal.md)"
        )

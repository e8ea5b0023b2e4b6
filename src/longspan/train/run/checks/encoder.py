"""Whether the keys of [encoder] fit the rest of a run; that data has images is known once the corpus is there."""

from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.train.config.encoder_section import EncoderSection
from longspan.train.config.sections import RunConfig


def check_encoder(config: RunConfig, home: Layout) -> None:
    """Raise ConfigError for an encoder that cannot be trained so."""
    encoder = config.encoder
    if len(home.ranks) % encoder.tp:
        fit = ", ".join(str(tp) for tp in range(1, len(home.ranks) + 1) if len(home.ranks) % tp == 0)
        raise ConfigError(f"encoder.tp is {encoder.tp}, and the run has {len(home.ranks)} ranks; use {fit}")
    if encoder.train == "none" and encoder.lr:
        raise ConfigError(f'encoder.lr is {encoder.lr:g} and encoder.train is "none"; leave out one of them')


def check_images(config: RunConfig, images: int) -> None:
    """Raise ConfigError where [encoder] is given and the data has no images, and for adapters beside images."""
    if images and config.lora.rank:
        raise ConfigError(
            f"lora.rank is {config.lora.rank}, and the data has images: longspan train does not train adapters beside "
            "an encoder; set lora.rank = 0, or use longspan.prepare(peft_model, world, encoder=Layout(...)) in Python"
        )
    if not images and config.encoder != EncoderSection():
        raise ConfigError(
            "[encoder] is given, and no row of the data has images; leave it out, or give rows with images "
            "(docs/multimodal.md)"
        )

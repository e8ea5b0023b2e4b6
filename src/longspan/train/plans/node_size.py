"""The key `context.node_size` in a world: the slots of a host that plans are made for."""

from dataclasses import replace

from longspan.comm import World
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, plural


def set_node_size(config: RunConfig, world: World) -> RunConfig:
    """Set how many slots a host of this world has, in place of "auto".

    >>> set_node_size(config, world).context.node_size == world.node_size  # doctest: +SKIP
    True

    Raises ConfigError for another number, on every rank, since all ranks of a world have one node size.
    """
    number, slots = config.context.node_size, world.node_size
    if number not in (AUTO, slots):
        raise ConfigError(
            f"context.node_size is {number}, and this world has {plural(slots, 'slot')} a host "
            f'(LOCAL_WORLD_SIZE / tp); use {slots}, or "{AUTO}", its default'
        )
    return replace(config, context=replace(config.context, node_size=slots))

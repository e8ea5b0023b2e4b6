"""Everything that talks: worlds, groups, rings, row exchange, and binding a micro-batch to a rank.

The only package that calls collectives. Names are imported on first use, so that starting ranks needs no torch here.
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.comm.all_ranks import (
        leave_together as leave_together,
        on_all_ranks as on_all_ranks,
        raise_first_error as raise_first_error,
        result_or_first_error as result_or_first_error,
    )
    from longspan.comm.channel import Channel as Channel, Handle as Handle
    from longspan.comm.device import to_device as to_device
    from longspan.comm.ring import (
        Addend as Addend,
        GradientRing as GradientRing,
        RingBlocks as RingBlocks,
        split_columns as split_columns,
    )
    from longspan.comm.shard import SequenceShard as SequenceShard, ShardPart as ShardPart, bind as bind
    from longspan.comm.world import World as World, world_of as world_of
    from longspan.launch.launch import run_local as run_local

__getattr__, __dir__, __all__ = lazy_exports(__name__)

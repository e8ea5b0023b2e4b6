"""Everything that talks: worlds, groups, rings, row exchange, and binding a micro-batch to a rank.

The only package that calls collectives. Names are imported on first use, so that starting ranks needs no torch here.
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.comm.all_ranks import leave_together as leave_together
    from longspan.comm.all_ranks import on_all_ranks as on_all_ranks
    from longspan.comm.all_ranks import raise_first_error as raise_first_error
    from longspan.comm.all_ranks import result_or_first_error as result_or_first_error
    from longspan.comm.channel import Channel as Channel
    from longspan.comm.channel import Handle as Handle
    from longspan.comm.ring import Addend as Addend
    from longspan.comm.ring import GradientRing as GradientRing
    from longspan.comm.ring import RingBlocks as RingBlocks
    from longspan.comm.ring import split_columns as split_columns
    from longspan.comm.shard import SequenceShard as SequenceShard
    from longspan.comm.shard import ShardPart as ShardPart
    from longspan.comm.shard import bind as bind
    from longspan.comm.shard import to_device as to_device
    from longspan.comm.world import World as World
    from longspan.comm.world import world_of as world_of
    from longspan.launch.launch import run_local as run_local

__getattr__, __dir__, __all__ = lazy_exports(__name__)

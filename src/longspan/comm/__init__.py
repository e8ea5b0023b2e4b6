"""Everything that talks: worlds, groups, collectives, rings, row exchange, and binding a micro-batch to a rank.

The only package that calls collectives. Names are imported on first use, so that starting ranks needs no torch here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.comm.groups.channel import Channel as Channel
    from longspan.comm.groups.channel import Handle as Handle
    from longspan.comm.host_arrays import to_device as to_device
    from longspan.comm.moves.collectives import all_reduce_sum as all_reduce_sum
    from longspan.comm.moves.collectives import gather_rows as gather_rows
    from longspan.comm.moves.collectives import scatter_rows as scatter_rows
    from longspan.comm.moves.ring import Addend as Addend
    from longspan.comm.moves.ring import GradientRing as GradientRing
    from longspan.comm.moves.ring import RingBlocks as RingBlocks
    from longspan.comm.moves.row_exchange import exchange_rows as exchange_rows
    from longspan.comm.moves.side_by_side import columns as columns
    from longspan.comm.shard import SequenceShard as SequenceShard
    from longspan.comm.shard import ShardPart as ShardPart
    from longspan.comm.shard import bind as bind
    from longspan.comm.waiting import patience as patience
    from longspan.comm.world import World as World
    from longspan.comm.world import world_of as world_of
    from longspan.launch.launch import run_local as run_local

_HOME_OF = {
    **dict.fromkeys(("all_reduce_sum", "gather_rows", "scatter_rows"), "longspan.comm.moves.collectives"),
    "columns": "longspan.comm.moves.side_by_side",
    **dict.fromkeys(("Channel", "Handle"), "longspan.comm.groups.channel"),
    "world_of": "longspan.comm.world",
    "to_device": "longspan.comm.host_arrays",
    "run_local": "longspan.launch.launch",
    "patience": "longspan.comm.waiting",
    **dict.fromkeys(("Addend", "GradientRing", "RingBlocks"), "longspan.comm.moves.ring"),
    "exchange_rows": "longspan.comm.moves.row_exchange",
    **dict.fromkeys(("SequenceShard", "ShardPart", "bind"), "longspan.comm.shard"),
    "World": "longspan.comm.world",
}

__all__ = [
    "Addend",
    "Channel",
    "GradientRing",
    "Handle",
    "RingBlocks",
    "SequenceShard",
    "ShardPart",
    "World",
    "all_reduce_sum",
    "bind",
    "columns",
    "exchange_rows",
    "gather_rows",
    "patience",
    "run_local",
    "scatter_rows",
    "to_device",
    "world_of",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'longspan.comm' has no attribute {name!r}; it has {', '.join(_HOME_OF)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value

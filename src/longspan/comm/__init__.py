"""Everything that talks: worlds, groups, collectives, rings, row exchange, and binding a micro-batch to a rank.

The only package that calls collectives. Names are imported on first use, so that starting ranks needs no torch here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.comm.channel import Channel as Channel
    from longspan.comm.channel import Handle as Handle
    from longspan.comm.collectives import all_reduce_sum as all_reduce_sum
    from longspan.comm.collectives import gather_rows as gather_rows
    from longspan.comm.collectives import scatter_rows as scatter_rows
    from longspan.comm.groups import world_of as world_of
    from longspan.comm.host_arrays import to_device as to_device
    from longspan.comm.launch import run_local as run_local
    from longspan.comm.matrix import columns as columns
    from longspan.comm.ring import Addend as Addend
    from longspan.comm.ring import GradientRing as GradientRing
    from longspan.comm.ring import RingBlocks as RingBlocks
    from longspan.comm.rows import exchange_rows as exchange_rows
    from longspan.comm.shard import SequenceShard as SequenceShard
    from longspan.comm.shard import ShardPart as ShardPart
    from longspan.comm.shard import bind as bind
    from longspan.comm.waiting import patience as patience
    from longspan.comm.world import World as World

_HOME_OF = {
    **dict.fromkeys(("all_reduce_sum", "gather_rows", "scatter_rows"), "longspan.comm.collectives"),
    "columns": "longspan.comm.matrix",
    **dict.fromkeys(("Channel", "Handle"), "longspan.comm.channel"),
    "world_of": "longspan.comm.groups",
    "to_device": "longspan.comm.host_arrays",
    "run_local": "longspan.comm.launch",
    "patience": "longspan.comm.waiting",
    **dict.fromkeys(("Addend", "GradientRing", "RingBlocks"), "longspan.comm.ring"),
    "exchange_rows": "longspan.comm.rows",
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

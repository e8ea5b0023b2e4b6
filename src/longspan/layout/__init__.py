"""Geometry as values: who is where (Layout), what is laid end to end (Packing), who holds which rows (Partition),
and what has to move between two such holdings (Exchange). Integers and numpy; no torch."""

from longspan.layout.exchange import Exchange, Placement
from longspan.layout.layout import Coordinates, Layout, check_degree
from longspan.layout.partition import Packing, Partition, check_lengths
from longspan.layout.segments import Flags, Floats, Integers, Segment, Segments

__all__ = [
    "Coordinates",
    "Exchange",
    "Flags",
    "Floats",
    "Integers",
    "Layout",
    "Packing",
    "Partition",
    "Placement",
    "Segment",
    "Segments",
    "check_degree",
    "check_lengths",
]

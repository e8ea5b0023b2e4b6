"""Planners, types, partitions and degrees of an evaluation, compared by the price of their plans."""

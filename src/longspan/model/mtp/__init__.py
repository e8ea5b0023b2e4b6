"""Depths of multi-token prediction in a model; `add_mtp` of `add_depths.py` makes them."""

"""Weights that every rank reads or draws for itself, its own shards alone, so that none ever holds a whole model."""

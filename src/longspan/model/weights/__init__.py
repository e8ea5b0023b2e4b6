"""Weights that every rank reads or draws for itself, only its own shards, so that none ever holds a whole model."""

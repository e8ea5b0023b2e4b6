"""Checkpoints: saved by all ranks, complete or not there at all."""

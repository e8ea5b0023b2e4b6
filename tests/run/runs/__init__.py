"""Runs of models, homes, data and precisions of every kind."""

"""Loggers of a run."""

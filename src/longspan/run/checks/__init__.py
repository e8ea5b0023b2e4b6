"""Checks of a configuration by subject, before any process group exists; `config_check.py` makes them all."""

"""Checks of a configuration, before data or a model are read."""

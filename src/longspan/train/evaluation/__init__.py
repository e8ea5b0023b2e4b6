"""Losses of an evaluation set, at any degree."""

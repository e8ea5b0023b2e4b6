"""Prepared models to folders that stock transformers loads, and such folders into prepared models."""

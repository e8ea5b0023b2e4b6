"""Encoders that feed a language model, each module under a home of its own over the same ranks."""

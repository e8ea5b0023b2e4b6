"""Layers that attend to a few keys for each row, which an indexer chooses: indexers, their scores, and latents."""

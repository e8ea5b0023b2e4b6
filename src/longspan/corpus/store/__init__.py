"""The tokens of a corpus: made in parallel, kept in a cache that runs share, or made again when they are read."""

"""The evaluation sets of a run: opened and checked before its first step; with metrics of a user's own."""

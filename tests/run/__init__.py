"""The loop of a run, and what it writes."""

"""The loop of a run, its set-up, and what it writes and shows."""

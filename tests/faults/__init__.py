"""Faults of machines, files and launchers during a run, and what a run makes of each."""

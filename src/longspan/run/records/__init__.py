"""What a run leaves beside its checkpoints: facts, rows of metrics, process groups, and what its loggers get."""

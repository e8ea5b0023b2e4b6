"""Multi-token prediction in training: the depths that a run's model gets, and their loss in a step."""

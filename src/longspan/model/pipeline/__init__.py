"""A model in stages: cutting it, schedules, gradients of weights that stages share."""

"""Optimizers and what drives them: classes by name, rounding of their updates, the learning rate of a step."""

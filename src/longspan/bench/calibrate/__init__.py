"""`longspan bench calibrate`: the constants of a Cost for a model on this machine."""

"""Whether a model may run: its declared rules, passes on the meta device, small copies, and trials of the model."""

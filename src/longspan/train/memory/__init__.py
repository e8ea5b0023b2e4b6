"""How many rows a slot holds."""

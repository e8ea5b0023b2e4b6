"""What happens before the first step of a run: imports and kernels made ahead, and what the start took."""

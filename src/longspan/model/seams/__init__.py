"""Where this package reaches into a transformers model: attention, head, norms, and what is refused."""

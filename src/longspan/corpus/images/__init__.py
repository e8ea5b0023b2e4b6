"""Images and videos: in files or rows, and what the processor of a model's folder makes of them."""

"""Whether a model computes each row by itself outside attention: by a small copy of its class, and by the model."""

"""A proof that longspan runs a model exactly, on this machine: a small copy of it against the stock model."""

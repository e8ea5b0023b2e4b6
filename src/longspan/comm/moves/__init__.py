"""What moves tensors between ranks: rings, row exchanges, collectives of tensor parallelism."""

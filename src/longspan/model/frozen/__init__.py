"""Weights that an adapter leaves as they are, in four or eight bits: packed as bytes, whole where a layer computes."""

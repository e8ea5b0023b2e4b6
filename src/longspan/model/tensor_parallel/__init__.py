"""Transformers' tensor-parallel plans, applied by style."""

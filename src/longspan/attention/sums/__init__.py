"""Sums and copies of rows and merges of partial outputs, on GPUs by kernels of one pass over memory."""

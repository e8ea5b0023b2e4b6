"""Evaluation: live in a run or a loop, and of saved weights."""

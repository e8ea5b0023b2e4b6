"""Evaluation of saved weights, as `longspan eval` does it: of a run, of one checkpoint, of a Hugging Face folder."""

"""`longspan bench attention`: forward and backward of attention over all ranks, beside torch's own."""

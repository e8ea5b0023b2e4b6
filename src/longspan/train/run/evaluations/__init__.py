"""The evaluations of a run: its sets of documents, when they are evaluated, and what is written of them."""

"""`longspan bench`: what is measured on a machine, and what is written beside it."""

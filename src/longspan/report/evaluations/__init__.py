"""The evaluations of a run in its report: rows as values, and the sections that show them."""

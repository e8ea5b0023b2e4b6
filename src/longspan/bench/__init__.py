"""`longspan bench`: measurements of a user's own configuration on this machine, and their records."""

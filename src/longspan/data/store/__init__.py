"""Documents as arrays on disk, and what their folder records."""

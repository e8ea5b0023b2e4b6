"""Source files of a corpus: which files there are, whether they changed, and the rows in them."""

"""What a step reads: documents, their order, and packs of them. Source files are read in `longspan.corpus`."""

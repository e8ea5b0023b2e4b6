"""What a step reads: documents and their order. Source files are read in `longspan.corpus`."""

"""What a step reads of documents: token ids, labels and numbers of the rows that a rank holds."""

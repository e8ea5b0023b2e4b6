"""What a step reads: documents, the order they come in, and packs of them. Knows no files of text and no tokenizer."""

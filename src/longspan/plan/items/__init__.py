"""Items of documents, such as images: which rows they take, who encodes these rows, and who needs them."""

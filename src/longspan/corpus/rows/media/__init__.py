"""Images and videos of rows: the entries that give them, and their placeholders among token ids."""

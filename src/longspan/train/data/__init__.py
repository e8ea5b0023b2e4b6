"""From files to the documents of a step."""

"""From the files of a corpus to rows of data: lines of JSON, whole texts, and tables."""

"""Linear layers and experts whose products run in float8, with one scale a row."""

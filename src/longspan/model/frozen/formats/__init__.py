"""Formats in which published folders hold weights in 4 and 8 bits: how they are read, and which numbers they mean."""

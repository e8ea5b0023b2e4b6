"""Rows of a step on this rank: read from documents, or gathered from those that other ranks brought."""

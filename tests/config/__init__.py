"""Configurations: what is read, inherited and refused."""

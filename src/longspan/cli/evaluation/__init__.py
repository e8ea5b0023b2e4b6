"""Flags, tables and files of `longspan eval`."""

"""The configuration of a run: its sections, and TOML files and flags that give it."""

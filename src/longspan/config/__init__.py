"""A run's configuration: its sections and keys, their defaults, and the file that they are read from."""

"""From a configuration to everything that a run works with."""

"""Forwards of stock modules that a sharded sequence changes: norms, rotary angles, temperatures, the head."""

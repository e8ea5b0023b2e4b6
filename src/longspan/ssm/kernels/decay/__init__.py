"""Recurrences of one decay a head without a delta term (Mamba 2)."""

"""Mixtures of experts: routing, balance losses, experts dealt out to ranks."""

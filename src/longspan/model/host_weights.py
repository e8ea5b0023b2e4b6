"""Weights and gradients that wait in the host's memory."""

from longspan.model.kinds import waits_on_host

__all__ = ["waits_on_host"]

"""Parameters whose shards and gradients wait in the host's memory."""

from torch import Tensor


def waits_on_host(parameter: Tensor) -> bool:
    """Return whether a parameter's local tensor is in the host's memory while no layer is gathered."""
    return getattr(parameter, "waits_on_host", False)

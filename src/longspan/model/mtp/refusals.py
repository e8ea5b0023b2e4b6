"""What depths of multi-token prediction do not run under yet."""

from torch import nn

from longspan.errors import ModelError
from longspan.model.adapters import Adapter
from longspan.model.mtp.depths import depths_of


def refuse_mtp(model: nn.Module, adapter: Adapter | None) -> None:
    """Raise ModelError where a model with depths cannot be prepared under a home, or with its adapter."""
    if not (count := len(depths_of(model))):
        return
    name = type(model).__name__
    if adapter is not None:
        raise ModelError(
            f"{name} has multi-token prediction of depth {count} and an adapter, which would be trained alone; leave "
            "one of them out"
        )

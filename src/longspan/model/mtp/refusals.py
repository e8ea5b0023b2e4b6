"""What depths of multi-token prediction do not run under."""

from torch import nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.lora.adapters import is_adapted
from longspan.model.mtp.depths import depths_of


def refuse_mtp(model: nn.Module, world: World) -> None:
    """Raise ModelError where a model with depths and an adapter cannot be prepared under a home."""
    name = type(model).__name__
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if depths_of(model) and world.home.pp > 1 and embedding is not None and is_adapted(embedding):
        raise ModelError(
            f"{name} has multi-token prediction, for which the last pipeline stage has a copy of the embedding, and an "
            "adapter of the embedding, which would be trained twice; leave it out of target_modules, or use pp 1"
        )

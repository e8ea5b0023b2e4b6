"""Models whose documents begin with a prefix that sees itself in both directions, as PaliGemma's prompts."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from longspan.plan.shape.families import find_family


def has_bidirectional_prefix(config: PreTrainedConfig) -> bool:
    """Return whether rows at the start of a document see each other in both directions (PaliGemma's prompts)."""
    return find_family(config.model_type).prefix_rows


def make_layers_causal(model: nn.Module) -> None:
    """Set `is_causal`, which transformers sets False in models with prefixes; the shard has their spans."""
    config: Any = model.config
    for module in model.modules():
        if getattr(module, "config", None) is config.get_text_config() and hasattr(module, "is_causal"):
            module.is_causal = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

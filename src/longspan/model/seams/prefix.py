"""Models whose prompt is a prefix: its rows see each other, images among them, and what follows is causal (PaliGemma).

In a step the prefix of a document is what stands before its first target (`train/reading/local_batch.py`), as the
models' own processor makes its labels.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

_FAMILIES = ("paligemma",)


def has_prefix(config: PreTrainedConfig) -> bool:
    """Whether a model of this configuration has one."""
    return config.model_type in _FAMILIES


def attend_causally(model: nn.Module) -> None:
    """Have the layers of a model with a prefix ask for causal attention: the shard's spans say what is seen beside it.

    They ask for none, as their model's own mask says all.
    """
    config: Any = model.config
    if not has_prefix(config):
        return
    for module in model.modules():
        if getattr(module, "config", None) is config.get_text_config() and hasattr(module, "is_causal"):
            module.is_causal = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

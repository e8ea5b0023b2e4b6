"""A model's configuration with another number of layers, for benches with random weights."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def change_layer_count(configuration: "PreTrainedConfig", count: int) -> "PreTrainedConfig":
    """Change a configuration to `count` layers, whose kinds (full attention, window) repeat in the model's order."""
    text = configuration.get_text_config()
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    text.num_hidden_layers = count
    text.layer_types = [types[layer % len(types)] for layer in range(count)]
    return configuration

"""The section [model] of a configuration. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from longspan.config.bounds import NonNegativeFloat


@dataclass(frozen=True)
class ModelConfig:
    """The model: a local Hugging Face folder, or random weights of a configuration or a preset."""

    preset: str = ""
    """Random weights: qwen3-tiny, llama-tiny, qwen3-deep-tiny (4 layers), qwen3-moe-tiny, gpt-oss-tiny (8 experts),
    qwen3-next-tiny, bamba-tiny, granite-hybrid-tiny (hybrids), or published sizes: qwen3-0.6b, qwen3-4b, qwen3-8b,
    qwen3-30b-a3b; empty: qwen3-tiny, unless path or config is set."""
    path: str = ""
    """A local Hugging Face folder with config.json and safetensors: its weights are trained on."""
    config: str = ""
    """A local Hugging Face folder, or its config.json: random weights of that configuration."""
    rope_scaling: str = ""
    """yarn or linear: scale rotary positions for documents beyond the model's max_position_embeddings; empty: never."""
    rope_factor: NonNegativeFloat = 0.0
    """How many times as long documents may be under rope_scaling; 0: what the longest needs, in quarters."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Parameters and optimizer states: float32, float64 or bfloat16."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Arithmetic of forward and backward passes: auto (bfloat16 on GPUs, as dtype on CPUs and under float64), float32,
    bfloat16 or float64; gradients are summed in float32, or float64."""

    @property
    def source(self) -> str:
        """The folder, or config.json, that names the model; empty where a preset does."""
        return self.path or self.config

    @property
    def preset_name(self) -> str:
        """The preset whose weights are drawn; empty where a folder or a configuration is named."""
        return "" if self.source else self.preset or "qwen3-tiny"

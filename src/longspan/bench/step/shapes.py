"""Shapes of models for `bench step`, and their configurations. Random weights; nothing is read from disk."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from longspan.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a Qwen3 decoder; with experts, of a Qwen3-MoE one."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0

    def changed(self, flags: Any) -> "Shape":
        """This shape with the sizes that flags give; 0 leaves a size as it is. Raises ConfigError."""
        sizes = {f.name: getattr(flags, f.name) for f in fields(self) if getattr(flags, f.name)}
        for name, size in sizes.items():
            if size < 0:
                raise ConfigError(f"--{name} is {size}; it must be at least 0")
        shape = replace(self, **sizes)
        if shape.experts and not (shape.experts_per_token and shape.expert_ffn):
            raise ConfigError(f"--experts {shape.experts} needs --experts_per_token and --expert_ffn")
        if shape.experts_per_token > shape.experts:
            raise ConfigError(
                f"--experts_per_token {shape.experts_per_token} is more than --experts {shape.experts}; give more "
                "experts, or let a token visit fewer"
            )
        if shape.heads % shape.key_value_heads:
            raise ConfigError(
                f"{shape.heads} query heads do not divide by {shape.key_value_heads} key/value heads; change --heads "
                "or --key_value_heads"
            )
        return shape

    def config(self, longest: int) -> "PreTrainedConfig":
        """transformers' configuration, for documents of up to `longest` rows."""
        from transformers import Qwen3Config, Qwen3MoeConfig

        sizes: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max(longest, 32768),
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if not self.experts:
            return Qwen3Config(**sizes)
        experts: dict[str, Any] = {"num_experts": self.experts, "num_experts_per_tok": self.experts_per_token}
        return Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=self.expert_ffn, norm_topk_prob=True)


SHAPES = {
    "qwen3-8b": Shape(hidden=4096, layers=36, heads=32, key_value_heads=8, head_size=128, ffn=12288, vocabulary=151936),
    "qwen3-30b-a3b": Shape(
        hidden=2048,
        layers=48,
        heads=32,
        key_value_heads=4,
        head_size=128,
        ffn=6144,
        vocabulary=151936,
        experts=128,
        experts_per_token=8,
        expert_ffn=768,
    ),
    "small": Shape(hidden=64, layers=2, heads=4, key_value_heads=2, head_size=16, ffn=128, vocabulary=512),
}


def shape_named(name: str) -> Shape:
    """A shape by its name. Raises ConfigError for another one."""
    if name not in SHAPES:
        raise ConfigError(f"--shape {name!r} is unknown; use one of {', '.join(SHAPES)}")
    return SHAPES[name]

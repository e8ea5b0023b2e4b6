"""What a model's configuration says of its work per token: weights that multiply, widths of queries, keys and values.

For decoders of attention and (gated) MLP layers, dense or with experts, as transformers describes them. State-space,
linear-attention and latent-attention layers are not priced from a configuration: measure them instead.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from longspan.errors import PlanError

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_UNPRICED = {  # attributes by which configurations show layers that are none of these
    "kv_lora_rank": "latent attention",
    "mamba_d_state": "state-space layers",
    "linear_num_key_heads": "linear-attention layers",
}
_LLAMA4_WIDTH = "intermediate_size_mlp"  # of dense layers; intermediate_size is that of experts, of which one is shared
_MEASURE = "measure this model with longspan bench calibrate, or give Cost its constants"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that decide the time of a step.

    >>> config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    >>> ModelShape.of(config | {"vocab_size": 1000}).weights
    145920

    `weights` multiply every token (active experts alone, the output projection once, no input embedding), of which
    `recomputed_weights` do so again where layers are recomputed (no output projection, and no last product of an MLP);
    `query_width` and `key_width` are heads x head size; `layers` attend to all earlier rows, `window_layers` of them
    only to the last `window`, and `chunk_layers` to those of their own `chunk` positions.
    """

    layers: int
    weights: int
    query_width: int
    key_width: int
    recomputed_weights: int = 0
    window_layers: int = 0
    window: int = 0
    chunk_layers: int = 0
    chunk: int = 0

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """The shape of a transformers configuration, an object or dict like one, a config.json or its folder.

        Raises PlanError naming the attributes that are missing, are no counts, or show layers that are not priced.
        """
        read = _Reader.of(config)
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        hidden, layers, heads, vocabulary = read.counts(*names, one_of=("intermediate_size", "moe_intermediate_size"))
        read.refuse_unpriced()
        head = read.count("head_dim") or hidden // heads
        query, key = heads * head, (read.count("num_key_value_heads") or heads) * head
        attention = hidden * (query + 2 * key) + query * hidden
        feed_forward = sum(_feed_forward(read, hidden, layer) for layer in range(layers))
        last = sum(hidden * _dense_width(read) for layer in range(layers) if not _visits_experts(read, layer))
        window, chunk = _window(read), read.count("attention_chunk_size")
        return cls(
            layers=layers,
            weights=layers * attention + feed_forward + hidden * vocabulary,
            query_width=query,
            key_width=key,
            recomputed_weights=layers * attention + feed_forward - last,
            window_layers=_window_layers(read, layers) if window else 0,
            window=window,
            chunk_layers=_layers_of_type(read, "chunked_attention") if chunk else 0,
            chunk=chunk,
        )


def _feed_forward(read: "_Reader", hidden: int, layer: int) -> int:
    """Weights of one layer's MLP (gate, up, down), or of its router and the experts that a token visits."""
    if not _visits_experts(read, layer):
        return 3 * hidden * _dense_width(read)
    visited = read.count("num_experts_per_tok")
    one = read.count("moe_intermediate_size") or read.count("intermediate_size")
    shared_experts = 1 if read.count(_LLAMA4_WIDTH) else read.count("n_shared_experts")
    shared = read.count("shared_expert_intermediate_size") or shared_experts * one
    return 3 * hidden * (visited * one + shared) + hidden * read.experts()[1]


def _dense_width(read: "_Reader") -> int:
    return read.count(_LLAMA4_WIDTH) or read.count("intermediate_size")


def _visits_experts(read: "_Reader", layer: int) -> bool:
    if not read.count("num_experts_per_tok"):
        return False
    if isinstance(listed := read.value("moe_layers"), list):
        return layer in listed
    dense = cast(Sequence[int], read.value("mlp_only_layers") or ())
    every = read.count("decoder_sparse_step") or 1
    return layer not in dense and (layer + 1) % every == 0 and layer >= read.count("first_k_dense_replace")


def _window(read: "_Reader") -> int:
    return 0 if read.value("use_sliding_window") is False else read.count("sliding_window")


def _window_layers(read: "_Reader", layers: int) -> int:
    return layers if read.value("layer_types") is None else _layers_of_type(read, "sliding_attention")


def _layers_of_type(read: "_Reader", kind: str) -> int:
    return sum(layer == kind for layer in read.value("layer_types") or ())


def read_query_heads(config: Any) -> int:
    """The query heads of a transformers configuration, an object or dict like one, a config.json or its folder.

    >>> read_query_heads({"num_attention_heads": 32})
    32

    Raises PlanError where it does not say them.
    """
    read = _Reader.of(config)
    if not (heads := read.count("num_attention_heads")):
        raise PlanError(
            f"{read.where} has no num_attention_heads, which limit the degrees of a2a; name a model that has"
        )
    return heads


class ExpertCounts(NamedTuple):
    """The experts of a layer, their attribute's name, and how many a token visits; 0, "" and 0 without experts."""

    of_layer: int
    name: str
    of_token: int


def read_experts(config: Any) -> ExpertCounts:
    """The experts of a transformers configuration, an object or dict like one, a config.json or its folder.

    >>> read_experts({"num_local_experts": 8, "num_experts_per_tok": 2})
    ExpertCounts(of_layer=8, name='num_local_experts', of_token=2)

    Raises PlanError for what is no count.
    """
    read = _Reader.of(config)
    name, count = read.experts()
    return ExpertCounts(count, name, read.count("num_experts_per_tok") if count else 0)


class _Reader:
    """Attributes of a configuration, whatever it is kept in."""

    def __init__(self, config: Any, where: str) -> None:
        self._config, self.where = config, where

    @classmethod
    def of(cls, config: Any) -> "_Reader":
        where = type(config).__name__
        if isinstance(config, (str, Path)):
            config, where = _from_file(Path(config))
        read = cls(config, where)
        text = read.value("text_config")  # of a model that also sees or hears
        return read if text is None else cls(text, f"text_config of {where}")

    def value(self, name: str) -> Any:
        """The attribute; None where there is none."""
        config = self._config
        return cast(dict[str, Any], config).get(name) if isinstance(config, dict) else getattr(config, name, None)

    def count(self, name: str) -> int:
        """The attribute as a count; 0 where it is missing or None."""
        value = self.value(name)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            said = repr(value)
            raise PlanError(f"{name} of {self.where} is {said[:40]}{'…' * (len(said) > 40)}; it must be a count")
        return value

    def experts(self) -> tuple[str, int]:
        """The name and the count of a layer's experts; "" and 0 without experts."""
        return next(((name, count) for name in _EXPERTS if (count := self.count(name))), ("", 0))

    def counts(self, *names: str, one_of: Sequence[str]) -> tuple[int, ...]:
        """Attributes that a model cannot be without, and one of others."""
        missing = [name for name in names if not self.count(name)]
        if not any(self.count(name) for name in one_of):
            missing.append(" or ".join(one_of))
        if missing:
            raise PlanError(f"{self.where} has no {', no '.join(missing)}; the cost of a model needs them")
        return tuple(self.count(name) for name in names)

    def refuse_unpriced(self) -> None:
        """Raise PlanError for layers whose time is not that of attention and an MLP."""
        unpriced = [what for name, what in _UNPRICED.items() if self.value(name) is not None]
        kinds: list[str] = sorted({str(kind) for kind in self.value("layer_types") or ()} - set(_LAYER_TYPES))
        if unpriced or kinds:
            what = " and ".join([*unpriced, *(f"layers of type {kind!r}" for kind in kinds)])
            raise PlanError(f"{self.where} has {what}, which no configuration prices; {_MEASURE}")


def _from_file(path: Path) -> tuple[Any, str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read a model's configuration from {file}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"cannot read a model's configuration from {file}: it is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise PlanError(f"{file} holds no model's configuration: it is not an object")
    return cast(dict[str, Any], values), str(file)

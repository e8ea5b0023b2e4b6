"""Which layers a small copy keeps, and the per-layer values of a configuration for them.

Layers differ by what lists say of each (their attention, their mixture or dense network, their rope), by lists of layer
indices, by counts of first or last layers, and by periods. One layer of every kind is kept, in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers")
LAYER_COUNTS += ("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_layers_per_stack", "depth")
_INDICES = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "cross_attention_layers", "attn_layer_indices")
_INDICES += ("hybrid_layer_ids", "local_layer_ids", "ple_layer_ids")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
_LAST = ("num_kv_shared_layers",)
_PERIODS = {"decoder_sparse_step": None, "attn_layer_period": "attn_layer_offset"}
_PERIODS |= {"expert_layer_period": "expert_layer_offset", "moe_layer_interval": None}
_MOST = 6


@dataclass(frozen=True)
class KeptLayers:
    """`kept` of `count` layers; what a list, indices or a count become for them."""

    count: int
    kept: tuple[int, ...]

    def cut(self, name: str, value: Any) -> Any:
        """The value of one attribute for the kept layers; the same value where it does not speak of layers."""
        if name in LAYER_COUNTS and value == self.count:
            return len(self.kept)
        if name in _INDICES and _is_list(value):
            return [new for new, old in enumerate(self.kept) if old in value]
        if name in _FIRST and isinstance(value, int):
            return sum(old < value for old in self.kept)
        if name in _LAST and isinstance(value, int):
            return sum(old >= self.count - value for old in self.kept)
        if name == "moe_layer_end_index" and isinstance(value, int):
            return len(self.kept) - 1
        if name == "per_layer_config" and isinstance(value, Mapping):
            return {new: value[key] for new, old in enumerate(self.kept) for key in value if int(key) == old}
        if _is_list(value) and len(value) == self.count and self.count > 1:
            return [value[old] for old in self.kept]
        return value


def kept_layers(values: Mapping[str, Any], least: int = 2) -> KeptLayers:
    """The first layer of every kind that a configuration's values tell apart, at least two layers where there are."""
    count = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), 0)
    kinds = [tuple(_kind(values, layer, count)) for layer in range(count)]
    first = [layer for layer in range(count) if kinds[layer] not in kinds[:layer]]
    layers = first[:_MOST] if len(first) <= _MOST else _covering(kinds, first)
    layers += [layer for layer in range(count) if layer not in layers][: max(0, least - len(layers))]
    return KeptLayers(count, _periodic(values, tuple(sorted(layers)), count))


def _kind(values: Mapping[str, Any], layer: int, count: int) -> list[str]:
    said = []
    for name, value in sorted(values.items()):
        if name in _INDICES and _is_list(value):
            said.append(f"{name}={layer in value}")
        elif name in _FIRST and isinstance(value, int):
            said.append(f"{name}={layer < value}")
        elif name in _LAST and isinstance(value, int):
            said.append(f"{name}={layer >= count - value}")
        elif name == "per_layer_config" and isinstance(value, Mapping):
            said.append(str([entry for key, entry in value.items() if int(key) == layer]))
        elif _is_list(value) and len(value) == count > 1:
            said.append(f"{name}={value[layer]}")
    return said


def _covering(kinds: Sequence[tuple[str, ...]], first: Sequence[int]) -> list[int]:
    """Of too many kinds, those layers that show each single property at least once."""
    layers: list[int] = []
    for layer in first:
        if set(kinds[layer]) - {said for other in layers for said in kinds[other]}:
            layers.append(layer)
    return layers


def _periodic(values: Mapping[str, Any], kept: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Two layers in which every period above one shows both its kinds: the attribute becomes a period of two."""
    periods = [name for name in _PERIODS if isinstance(values.get(name), int) and values[name] > 1]
    return tuple(range(min(4, count))) if periods and len(kept) < 4 else kept


def small_periods(values: Mapping[str, Any]) -> dict[str, int]:
    """Periods above one as periods of two, their offset as 1 where it is not 0."""
    small: dict[str, int] = {}
    for name, offset in _PERIODS.items():
        if isinstance(values.get(name), int) and values[name] > 1:
            small[name] = 2
            if offset is not None:
                small[offset] = min(1, values[offset])
    return small


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)

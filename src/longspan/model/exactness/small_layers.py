"""Which layers a small copy has, and the values of a configuration for them.

Kinds of layers are told apart by lists with an entry for each layer (its attention, its mixture or dense network, its
rope), by lists of layer indices, by counts of first or last layers, and by periods. One layer of every kind is chosen,
in order.
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
_MOST = 6  # kinds of layers that each get a layer; of more kinds, layers that show each property


@dataclass(frozen=True)
class LayerChoice:
    """The layers, of `count`, that a small copy has; `layer_value` gives the values of a configuration for them."""

    count: int
    layers: tuple[int, ...]

    def layer_value(self, name: str, value: Any) -> Any:
        """Return the value of one attribute for the chosen layers; values that do not depend on layers stay.

        Layers 0, 3 and 7 of 8, say, become layers 0, 1 and 2: the count of layers becomes 3. A list of layer indices
        becomes that of the new indices of the chosen layers in it. A number of first or last layers becomes how many of
        these layers are chosen. The index at which experts end becomes the last index. A table by layer, or a list with
        one entry for each layer, keeps the entries of the chosen layers.
        """
        if name in LAYER_COUNTS and value == self.count:
            return len(self.layers)
        if name in _INDICES and _is_list(value):
            return [index for index, layer in enumerate(self.layers) if layer in value]
        if name in _FIRST and isinstance(value, int):
            return sum(layer < value for layer in self.layers)
        if name in _LAST and isinstance(value, int):
            return sum(layer >= self.count - value for layer in self.layers)
        if name == "moe_layer_end_index" and isinstance(value, int):
            return len(self.layers) - 1
        if name == "per_layer_config" and isinstance(value, Mapping):
            return {index: value[key] for index, layer in enumerate(self.layers) for key in value if int(key) == layer}
        if _is_list(value) and len(value) == self.count and self.count > 1:
            return [value[layer] for layer in self.layers]
        return value


def choose_layers(values: Mapping[str, Any], least: int = 2) -> LayerChoice:
    """Choose the first layer of every kind, and further ones up to `least`.

    >>> choose_layers({"num_hidden_layers": 8, "layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 3})
    LayerChoice(count=8, layers=(0, 5))

    A kind is the list of what a configuration's values say of a layer. If there are more than six kinds, layers are
    chosen that show each of these properties at least once.
    """
    count = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), 0)
    kinds = [tuple(_layer_properties(values, layer, count)) for layer in range(count)]
    layers = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    if len(layers) > _MOST:
        layers = _covering_layers(kinds, layers)
    further_layers = [layer for layer in range(count) if layer not in layers]
    layers += further_layers[: max(0, least - len(layers))]
    return LayerChoice(count, _cover_periods(values, tuple(sorted(layers)), count))


def _layer_properties(values: Mapping[str, Any], layer: int, count: int) -> list[str]:
    """Return what the values of a configuration say of one layer, as texts that can be compared.

    Layers with equal texts are alike, so that a small model needs one of them. Values speak of layers as lists of
    indices, as numbers of first or last layers, or with one entry for each layer.
    """
    properties = list[str]()
    for name, value in sorted(values.items()):
        if name in _INDICES and _is_list(value):
            properties.append(f"{name}={layer in value}")
        elif name in _FIRST and isinstance(value, int):
            properties.append(f"{name}={layer < value}")
        elif name in _LAST and isinstance(value, int):
            properties.append(f"{name}={layer >= count - value}")
        elif name == "per_layer_config" and isinstance(value, Mapping):
            properties.append(str([entry for key, entry in value.items() if int(key) == layer]))
        elif _is_list(value) and len(value) == count > 1:
            properties.append(f"{name}={value[layer]}")
    return properties


def _covering_layers(kinds: Sequence[tuple[str, ...]], candidates: Sequence[int]) -> list[int]:
    """Select the candidates, in order, that show a property which those before them do not."""
    layers, properties = list[int](), set[str]()
    for layer in candidates:
        if not properties.issuperset(kinds[layer]):
            layers.append(layer)
            properties.update(kinds[layer])
    return layers


def _cover_periods(values: Mapping[str, Any], layers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return these layers, or the first four if there are fewer and the configuration has periods above one.

    Periods become two in a small copy, so that four layers show each kind twice.
    """
    periods = [name for name in _PERIODS if isinstance(values.get(name), int) and values[name] > 1]
    return tuple(range(min(4, count))) if periods and len(layers) < 4 else layers


def small_periods(values: Mapping[str, Any]) -> dict[str, int]:
    """Return periods above one as periods of two, with offsets of 0 or 1."""
    small: dict[str, int] = {}
    for name, offset in _PERIODS.items():
        if isinstance(values.get(name), int) and values[name] > 1:
            small[name] = 2
            if offset is not None:
                small[offset] = min(1, values[offset])
    return small


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)

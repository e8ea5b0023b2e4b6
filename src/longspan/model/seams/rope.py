"""Rotary positions: how long documents may be, scaling for longer ones, and frequencies chosen by document.

"longrope" (Phi-3, MiniCPM3) and "dynamic" (NTK) modules of transformers read the longest position of a call, which over
packed rows is another document's. Here a fresh copy is called for each length, with a row at its last position.
"""

import copy
from collections.abc import Mapping
from copy import deepcopy
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import PreTrainedConfig

from longspan.comm import SequenceShard, to_device
from longspan.errors import ModelError
from longspan.layout.segments import Integers, expand_runs
from longspan.model.seams.running_layer import running_layer
from longspan.model.seams.trial_shards import Probe
from longspan.plan.shape.positions import LengthLimit, has_no_positions, position_limit

SCALINGS = ("yarn", "linear")


def scale_rope(config: PreTrainedConfig, kind: str, factor: float) -> PreTrainedConfig:
    """Copy a configuration, with rotary frequencies scaled for documents `factor` times as long.

    >>> config = scale_rope(AutoConfig.from_pretrained(folder), "yarn", 4.0)

    "yarn" keeps high frequencies and scales attention logits up (its attention factor, 0.1 ln factor + 1); "linear"
    divides all frequencies by the factor. Stock transformers reads either from the saved config.json. Raises ModelError
    for another kind, and for a model that has no rotary positions or a scaling of its own.
    """
    name = config.model_type
    if kind not in SCALINGS:
        raise ModelError(f"rope scaling {kind!r} is not known; use {' or '.join(SCALINGS)}")
    if has_no_positions(config):
        raise ModelError(
            f"{name} has no rotary positions that {kind!r} could scale, and knows documents of any length; leave "
            "model.rope_scaling empty"
        )
    limit = position_limit(config)
    scaled_config = deepcopy(config)
    parameters = getattr(scaled_config, "rope_parameters", None)
    is_one_set = isinstance(parameters, dict) and not any(isinstance(x, dict) for x in parameters.values())
    if limit is None or parameters is None or not is_one_set:
        raise ModelError(
            f"{name} cannot be scaled by rope {kind!r}: its configuration has no max_position_embeddings and one "
            "rope_parameters for all layers; train on shorter documents (data.max_document_tokens)"
        )
    if (old_type := parameters.get("rope_type", parameters.get("type", "default"))) != "default":
        raise ModelError(
            f"{name} has a rope scaling of its own ({old_type!r}, for documents of up to {limit} tokens), and a second "
            f"one, {kind!r}, cannot be put on it; leave model.rope_scaling empty, or edit its rope_parameters"
        )
    # "type" is the older name of "rope_type".
    scaled_parameters = {key: value for key, value in parameters.items() if key != "type"} | {
        "rope_type": kind,
        "factor": float(factor),
    }
    if kind == "yarn":
        scaled_parameters["original_max_position_embeddings"] = limit
        # Readers of linear scaling multiply by the factor themselves.
        scaled_config.max_position_embeddings = int(limit * factor)
    scaled_config.rope_parameters = scaled_parameters
    scaled_config.validate_rope()
    return scaled_config


def rope_types(rope: Any) -> set[str]:
    """Return the types that rotary parameters name, under "rope_type" or the older "type", or by type of layer."""
    if not isinstance(rope, Mapping):
        return set()
    nested = (rope_types(values) for values in rope.values())
    return {str(rope[key]) for key in ("rope_type", "type") if key in rope}.union(*nested)


def replace_rotary_forwards(model: nn.Module) -> None:
    """Replace, in place, the forward of every rotary module whose frequencies depend on a length by one that sees every
    document by itself.

    It looks up the shard with which the model or layer around it runs.
    """
    for module in model.modules():
        if length_dependent_types(module):
            module.forward = MethodType(_rotary_forward, module)


def length_dependent_types(rotary: nn.Module) -> dict[str | None, str]:
    """Return the rope types of a rotary module that choose frequencies by a length, by type of layer.

    The key is None where all layers share one rope type.
    """
    kind = getattr(rotary, "rope_type", None)
    kinds = kind.items() if isinstance(kind, dict) else [(None, kind)]
    return {layer_type: name for layer_type, name in kinds if isinstance(name, str) and depends_on_length(name)}


def depends_on_length(kind: str) -> bool:
    """Return whether frequencies of this rope type depend on the longest position of a call."""
    return "dynamic" in kind or kind == "longrope"


def _rotary_forward(rotary: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """cos, sin for position_ids (1, T), each row by its own document's length. A probe, and a type of layer whose
    rope is fixed, get the module's first frequencies."""
    shard = running_layer().shard
    kind: Any = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]  # pyright: ignore[reportIndexIssue, reportArgumentType]
    layer_type_argument = {} if layer_type is None else {"layer_type": layer_type}
    if isinstance(shard, Probe) or not depends_on_length(kind):
        fresh_rotary: Any = _copy_fresh_rotary(rotary)
        # transformers changes frequencies by the longest position unless the type is "default".
        fresh_rotary.rope_type = "default" if layer_type is None else {layer_type: "default"}
        return fresh_rotary(x, position_ids, **layer_type_argument)
    if not isinstance(shard, SequenceShard) or position_ids.shape != (1, shard.local_rows):
        got = "no shard" if not isinstance(shard, SequenceShard) else f"position_ids of {tuple(position_ids.shape)}"
        raise ModelError(
            f"{type(rotary).__name__} chooses {kind!r} frequencies by a document's length and got {got}: the module "
            "that calls it must get shard= and hand on position_ids of one packed row; use another rope type"
        )
    positions = position_ids.masked_fill(shard.rows < 0, 0)  # rows of padding have no document
    rows_by_length = _rows_by_length(shard, rotary, kind, layer_type)
    parts = list[Any]()
    for length, rows in rows_by_length.items():
        # All rows are taken without an index, which would have to be sent to the device.
        is_all = len(rows) == positions.shape[1]
        positions_here = positions if is_all else positions[:, to_device(rows, positions.device)]
        # The module takes the largest position plus one for the length: `length` − 1 is appended, then dropped.
        with_last = torch.cat([positions_here, positions_here.new_full((1, 1), length - 1)], dim=1)
        frequencies = _copy_fresh_rotary(rotary)(x, with_last, **layer_type_argument)
        parts.append(tree_map(lambda out: out[:, :-1], frequencies))
    order = np.concatenate(list(rows_by_length.values()))  # the row of each place in the results, one after another
    if len(parts) == 1:
        return parts[0]
    place = to_device(np.argsort(order), x.device)
    leaves, structure = zip(*map(tree_flatten, parts), strict=True)
    joined = [torch.cat(leaf_parts, dim=1).index_select(1, place) for leaf_parts in zip(*leaves, strict=True)]
    return tree_unflatten(joined, structure[0])


def _rows_by_length(
    shard: SequenceShard, rotary: nn.Module, kind: str, layer_type: str | None
) -> dict[int, Integers]:
    """Lengths that give the same frequencies count as one."""
    rows: dict[int, list[Integers]] = {}
    limit = _limit_of_rope_type(rotary, kind, layer_type)
    for shard_part in shard.parts:
        segments = shard_part.segments()
        # A prefix counts as long as the longest document that continues it: all of these have the same frequencies, as
        # `CallRules.check_shared_prefixes` has seen to.
        longest = np.asarray(shard_part.group.longest_paths, dtype=np.int64)[segments.document]
        lengths = limit.representative_lengths(longest)
        first = shard_part.start + segments.offset
        for length in np.unique(lengths).tolist():
            is_length = lengths == length
            rows.setdefault(length, []).append(
                expand_runs(first[is_length], (first + segments.stop - segments.start)[is_length])
            )
    return {length: np.concatenate(runs) for length, runs in rows.items()}


def length_limits(module: nn.Module) -> set[LengthLimit]:
    """Return by which lengths of documents a rotary module chooses frequencies; an empty set for other modules."""
    return {
        _limit_of_rope_type(module, kind, layer_type) for layer_type, kind in length_dependent_types(module).items()
    }


def _limit_of_rope_type(rotary: nn.Module, kind: str, layer_type: str | None) -> LengthLimit:
    """A "longrope" has a set up to a limit and one beyond it, "dynamic" one for each length beyond the trained one."""
    owner: Any = rotary
    if kind == "longrope":
        parameters = owner.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        return LengthLimit(parameters["original_max_position_embeddings"], of_each_length=False)
    return LengthLimit(owner.original_max_seq_len, of_each_length=True)


def _copy_fresh_rotary(rotary: nn.Module) -> nn.Module:
    """The copy has its own buffers, as a forward may write to them, at their first values; a dynamic one counts
    anew."""
    fresh_rotary: Any = copy.copy(rotary)
    del fresh_rotary.__dict__["forward"]
    buffers = {name: None if x is None else x.clone() for name, x in rotary.named_buffers(recurse=False)}
    for name in buffers:
        prefix = name.removesuffix("inv_freq")
        original = getattr(rotary, f"{prefix}original_inv_freq", None)
        if name.endswith("inv_freq") and isinstance(original, Tensor):
            buffers[name] = original.clone()
    fresh_rotary.__dict__["_buffers"] = buffers
    for name in vars(rotary):
        if name.endswith("max_seq_len_cached"):
            setattr(fresh_rotary, name, fresh_rotary.original_max_seq_len)
    return fresh_rotary

"""Rotary frequencies that depend on a document's length, chosen for each document by its own.

transformers' "longrope" (Phi-3, Phi-4-mini, MiniCPM3: short or long factors) and "dynamic" (NTK) rotary modules read
the longest position of a call, which over packed and sharded rows is one of other documents, and another on every rank.
Here such a module is called once for each length, with one more row at that document's last position: so it sees what
it would see if the document were the whole sequence. The shard has the lengths of rows.

A rotary module also keeps the frequencies of the longest document that it met ("dynamic" those of the length at which
it grew last). The reference is a fresh model for each document: a copy in its first state is called.

The shard comes from the module that calls the rotary one, by a hook: that is the base model, or a layer, which in
recomputation gets it again.
"""

import copy
from collections.abc import Mapping
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from longspan.comm import SequenceShard, to_device
from longspan.errors import ModelError
from longspan.layout.segments import Integers, expand_runs
from longspan.model.seams.attention_calls import Probe
from longspan.model.seams.layer_arguments import find_layer_shard

_CALL = "_shard_of_call"


def choose_frequencies_by_document(model: nn.Module) -> None:
    """Have every rotary module whose frequencies depend on a length see every document by itself."""
    for parent in model.modules():
        rotary_modules = [child for child in parent.children() if types_by_length(child)]
        for rotary in rotary_modules:
            rotary.forward = MethodType(_rotary_forward, rotary)
        if rotary_modules:
            parent.register_forward_pre_hook(_note_shard, with_kwargs=True)
            parent.register_forward_hook(_forget_shard, always_call=True)


def types_by_length(rotary: nn.Module) -> set[str]:
    """Return the rope types of a rotary module that choose frequencies by a length; none for other modules.

    A module has one type, or one for each type of layer.
    """
    kind = getattr(rotary, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return {name for name in kinds if isinstance(name, str) and depends_on_length(name)}


def depends_on_length(kind: str) -> bool:
    """Return whether frequencies of this rope type depend on the longest position of a call."""
    return "dynamic" in kind or kind == "longrope"


def _note_shard(parent: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for child in parent.children():
        if types_by_length(child):
            child.__dict__[_CALL] = kwargs.get("shard")


def _forget_shard(parent: nn.Module, args: object, out: object) -> None:
    for child in parent.children():
        child.__dict__.pop(_CALL, None)


def _rotary_forward(rotary: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Return what the rotary module's class returns for position_ids (1, T), each row by its own document's length.

    A probe, which has no documents, gets the frequencies that the module was made with, as does a type of layer whose
    frequencies depend on no length.
    """
    shard = rotary.__dict__.get(_CALL) or find_layer_shard()  # a layer may keep keyword arguments to itself
    kind: Any = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]  # pyright: ignore[reportIndexIssue, reportArgumentType]
    if isinstance(shard, Probe) or not depends_on_length(kind):
        fresh_rotary: Any = _copy_fresh_rotary(rotary)
        # transformers changes frequencies by the longest position unless the type is "default".
        fresh_rotary.rope_type = "default" if layer_type is None else {layer_type: "default"}
        return fresh_rotary(x, position_ids, **_layer_type_argument(layer_type))
    if not isinstance(shard, SequenceShard) or position_ids.shape != (1, shard.local_rows):
        got = "no shard" if not isinstance(shard, SequenceShard) else f"position_ids of {tuple(position_ids.shape)}"
        raise ModelError(
            f"{type(rotary).__name__} chooses {kind!r} frequencies by a document's length and got {got}: the module "
            "that calls it must get shard= and hand on position_ids of one packed row; use another rope type"
        )
    positions = position_ids.masked_fill(shard.rows < 0, 0)  # rows of padding have no document
    rows_by_length = _group_rows(shard, rotary, kind, layer_type)
    parts = [_document_frequencies(rotary, layer_type, x, positions, *item) for item in rows_by_length.items()]
    order = np.concatenate(list(rows_by_length.values()))  # the row of each place in the results, one after another
    if len(parts) == 1:
        return parts[0]
    place = to_device(np.argsort(order), x.device)
    leaves, structure = zip(*map(tree_flatten, parts), strict=True)
    joined = [torch.cat(leaf_parts, dim=1).index_select(1, place) for leaf_parts in zip(*leaves, strict=True)]
    return tree_unflatten(joined, structure[0])


def _group_rows(shard: SequenceShard, rotary: nn.Module, kind: str, layer_type: str | None) -> dict[int, Integers]:
    """Return the local rows of the documents of each length; lengths that give the same frequencies count as one."""
    rows: dict[int, list[Integers]] = {}
    for shard_part in shard.parts:
        segments = shard_part.segments()
        lengths = np.asarray(shard_part.group.lengths, dtype=np.int64)[segments.document]
        lengths = _representative_lengths(rotary, kind, layer_type, lengths)
        first = shard_part.start + segments.offset
        for length in np.unique(lengths).tolist():
            is_length = lengths == length
            rows.setdefault(length, []).append(
                expand_runs(first[is_length], (first + segments.stop - segments.start)[is_length])
            )
    return {length: np.concatenate(of_length) for length, of_length in rows.items()}


def _representative_lengths(rotary: nn.Module, kind: str, layer_type: str | None, lengths: Integers) -> Integers:
    """longrope has two sets of frequencies, up to a limit and beyond it; dynamic has one up to the trained length, and
    another for each length beyond.
    """
    owner: Any = rotary
    if kind == "longrope":
        parameters = owner.config.rope_parameters
        limit = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
        return np.where(lengths > limit, limit + 1, limit)
    return np.maximum(lengths, owner.original_max_seq_len)


def _document_frequencies(
    rotary: nn.Module, layer_type: str | None, x: Tensor, positions: Tensor, length: int, rows: Integers
) -> Any:
    """Compute what a new module gives for some rows of documents of one length: tensors (1, rows, …).

    The module takes the largest position plus one for the length. These rows may lack the last position of the
    document, so the position `length` − 1 is appended, and its result is dropped.
    """
    # All rows are taken without an index, which would have to be sent to the device.
    positions_here = positions if len(rows) == positions.shape[1] else positions[:, to_device(rows, positions.device)]
    with_last = torch.cat([positions_here, positions_here.new_full((1, 1), length - 1)], dim=1)
    return tree_map(
        lambda out: out[:, :-1], _copy_fresh_rotary(rotary)(x, with_last, **_layer_type_argument(layer_type))
    )


def _copy_fresh_rotary(rotary: nn.Module) -> nn.Module:
    """Buffers are named "inv_freq", with the type of layer before it if each type has its own. The copy has its class's
    forward, and buffers of its own, as that forward may write to them; a dynamic one counts from the trained length
    again.
    """
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


def _layer_type_argument(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}

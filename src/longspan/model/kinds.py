"""Which modules of a model are mixers, indexers, experts, routers or heads that score, told by their classes alone.

The file of a kind is not imported here; modules of peft are told in `adapted_modules.py`.
"""

import inspect
from functools import cache
from types import FunctionType
from typing import Any, TypeGuard, cast

from torch import nn

from longspan.model.adapted_modules import name_without_adapter
from longspan.model.layers import MTP
from longspan.plan.shape.model_shape import read_experts

ROWWISE_LAYER_TYPES = ("mlp", "moe")  # types of layers in which rows do not meet, as Nemotron-H names them


def class_forward(module: nn.Module) -> FunctionType:
    """Return the forward that its class defines, unwrapped; `prepare` refuses wrappers that are not transformers'."""
    return inspect.unwrap(type(module).forward)


def is_linear(module: object) -> TypeGuard[nn.Linear]:
    """Return whether a module is an nn.Linear and computes as one: its class has no forward of its own.

    DeepSeek-V4's grouped linears have one, and routers of Llama 4: they get no adapter, are not packed, compute in no
    float8, and are not split over tp.
    """
    return isinstance(module, nn.Linear) and class_forward(module) is nn.Linear.forward


# ---- mixers (`seams/mixers.py`)

# names of the functions that forwards of mixers call: the convolution, one of the scans, and others that are known
CONVOLUTION = "causal_conv1d_fn"
SCANS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
_IN_MIXERS = frozenset({
    CONVOLUTION,
    *SCANS,
    "mamba2_split_conv1d_scan_combined",
    "apply_mask_to_padding_states",  # there is no mask
    # This function and the following ones are steps of generation, with a cache.
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
})  # fmt: skip


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the mixers of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_mixer(module)}


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module's class has a mixer's forward: it calls a causal convolution, and of other functions only
    those in `_IN_MIXERS`.
    """
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return False
    called = called_functions(class_forward(module))
    return CONVOLUTION in called and called <= _IN_MIXERS


def called_functions(forward: Any) -> set[str]:
    """Return the names of module-level functions that a forward mentions; none if it is no plain function."""
    if not isinstance(forward, FunctionType):
        return set()
    globals_by_name = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {name for name, value in globals_by_name.items() if callable(value) and not isinstance(value, type)}


# ---- indexers, which choose a few keys for each row (`seams/chosen_keys/`)

_CACHE_CALL = "update_indexer"  # appends index keys to a cache, and returns all
_TOP_KEYS = "topk"
_IN_INDEXERS = frozenset({
    _CACHE_CALL,
    _TOP_KEYS,
    *("wq_b", "wk", "k_norm", "weights_proj", "q_input_norm", "softmax_scaling"),  # modules, each by rows
    *("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "relu", "matmul", "masked_fill"),
    *("head_dim", "index_topk", "layer_idx", "n_heads", "qk_rope_head_dim", "softmax_scale", "use_rope", "weight"),
    *("F", "torch", "bool", "dtype", "float", "int32", "indices", "min", "shape", "to"),
    *("cat", "split", "squeeze", "transpose", "unsqueeze", "view"),
})  # fmt: skip


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module chooses the keys that each row attends to, in a way that is known.

    Its forward must score the index keys of a cache and take the best, and name nothing outside of `_IN_INDEXERS`.
    """
    forward = class_forward(module)
    names = {*forward.__code__.co_names} if isinstance(forward, FunctionType) else set[str]()
    return {_CACHE_CALL, _TOP_KEYS} <= names <= _IN_INDEXERS


def find_indexers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the indexers of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_indexer(module)}


def attends_to_chosen_keys(module: nn.Module) -> bool:
    """Return whether a module attends to keys that a known indexer chose: its own, or that of a layer before."""
    forward = class_forward(module)
    indexer = getattr(module, "indexer", None)
    if not isinstance(forward, FunctionType) or "indexer" not in forward.__code__.co_names:
        return False
    if indexer is not None:
        return is_indexer(indexer)
    return "prev_topk_indices" in forward.__code__.co_varnames


# ---- modules that make keys of windows of rows, "entries", and those that choose among them (`seams/entries.py`)

# These calls of a cache take rows and give entries, or the rows of the window before the first one.
_WINDOW_CALLS = {"store_compression_weights", "update_compressor_states"}
_OVERLAP_CALL = "update_overlap_state"
_IN_COMPRESSORS = frozenset({
    *_WINDOW_CALLS,
    _OVERLAP_CALL,
    *("kv_proj", "gate_proj", "kv_norm", "position_bias", "rotary_emb", "rope_layer_type", "indexer"),
    *("compress_rate", "head_dim", "layers", "apply_rotary_pos_emb"),
    *("torch", "arange", "device", "dtype", "float32", "float", "shape", "to"),
    *("softmax", "sum", "masked_fill", "new_full", "new_zeros", "full_like", "where", "scatter_"),
    *("expand", "squeeze", "unsqueeze", "view"),
})  # fmt: skip
_IN_ENTRY_INDEXERS = _IN_COMPRESSORS | frozenset({
    *(_TOP_KEYS, "indices", "index_topk", "min", "q_b_proj", "scorer", "num_heads", "transpose"),
})  # fmt: skip


@cache
def _names_in_forward(kind: type[nn.Module]) -> frozenset[str]:
    forward = inspect.unwrap(kind.forward)
    return frozenset(forward.__code__.co_names if isinstance(forward, FunctionType) else ())


def makes_entries(module: Any) -> bool:
    """Return whether a module compresses windows of rows to keys, "entries", in a way that is known: its forward hands
    rows to a cache's layer and takes whole windows of them, and names nothing outside of `_IN_COMPRESSORS`.
    """
    return isinstance(module, nn.Module) and _WINDOW_CALLS <= _names_in_forward(type(module)) <= _IN_COMPRESSORS


def chooses_entries(module: Any) -> bool:
    """Return whether a module makes entries of its own and takes the best of them for each row, in a way that is
    known.
    """
    if not isinstance(module, nn.Module):
        return False
    return {*_WINDOW_CALLS, _TOP_KEYS} <= _names_in_forward(type(module)) <= _IN_ENTRY_INDEXERS


def reads_window_before(compressor: nn.Module) -> bool:
    """Return whether an entry is made of its own window and the one before it."""
    return _OVERLAP_CALL in _names_in_forward(type(compressor))


def find_choosing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules that choose keys or entries, by name: their weights get no gradient."""
    return {name: module for name, module in model.named_modules() if is_indexer(module) or chooses_entries(module)}


def attends_to_entries(module: nn.Module) -> bool:
    """Return whether a module attends to the entries of its `compressor`, and an indexer in that is known."""
    compressor = getattr(module, "compressor", None)
    if not makes_entries(compressor) or "compressor" not in _names_in_forward(type(module)):
        return False
    indexer = getattr(compressor, "indexer", None)
    return indexer is None or chooses_entries(indexer)


# ---- heads that score (`score_heads.py`)

# how names of classes with a head of scores end
SCORE_HEADS = ("ForSequenceClassification", "ForTokenClassification")


def score_columns(model: nn.Module) -> int:
    """Return how many scores a row of a prepared model has (num_labels); 0 for a language model."""
    # A PipelineModel names its stages' class.
    kind: Any = getattr(model, "architecture", type(model))
    return cast(Any, model).config.num_labels if getattr(kind, "makes_scores", False) else 0


# ---- experts (`experts/`)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold experts, by qualified name; they have attributes of transformers' interface."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "is_transposed") and hasattr(m, "down_proj")}


def router_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers next to experts, by name, without those of multi-token prediction: some of the rows there have
    no token.
    """
    routers = dict[str, nn.Module]()
    experts = (name for name in expert_modules(model) if not name.startswith(f"{MTP}."))
    for block in (name_without_adapter(name).rpartition(".")[0] for name in experts):
        children = model.get_submodule(block).named_children()
        routers |= {f"{block}.{n}": m for n, m in children if hasattr(m, "top_k") and hasattr(m, "num_experts")}
    return routers


def choosing_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers that choose experts by scores, by name: those that choose by token ids have nothing to
    balance.
    """
    return {name: router for name, router in router_modules(model).items() if not _routes_by_ids(router)}


def _routes_by_ids(router: nn.Module) -> bool:
    return "input_ids" in inspect.signature(class_forward(router)).parameters


def router_sizes(model: nn.Module) -> tuple[int, ...]:
    """Return how many experts each router of the model chooses from by scores."""
    return tuple(int(router.num_experts) for router in choosing_routers(model).values())  # pyright: ignore


def has_experts(model: Any) -> bool:
    """Return whether a model has experts, by its configuration or its modules."""
    return read_experts(model.config).of_layer > 1 or bool(expert_modules(model))

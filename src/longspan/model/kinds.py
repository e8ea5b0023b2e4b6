"""Which modules of a model are mixers, indexers, experts, routers or heads that score, told by their classes alone.

The file of a kind is not imported here; modules of peft are told in `adapted_modules.py`.
"""

import dis
import inspect
from functools import cache
from itertools import pairwise
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


def uncalled_linears(model: nn.Module) -> list[str]:
    """List the linears, by name, of which the forward of their owner reads the weight alone, past an adapter: it calls
    none of them. LongCat's router is such.
    """
    return [
        f"{path}.{name}"
        for path, owner in model.named_modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.Linear) and reads_weight_alone(owner, name)
    ]


def reads_weight_alone(owner: nn.Module, name: str) -> bool:
    """Return whether the forward of a module reads the weight of its child of this name, and never calls the child."""
    return name in _attributes_read_for_weights(class_forward(owner))


@cache
def _attributes_read_for_weights(forward: FunctionType) -> frozenset[str]:
    if not isinstance(forward, FunctionType):
        return frozenset()
    names = [step.argval for step in dis.get_instructions(forward) if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    uses = dict[str, set[str]]()
    for name, behind in pairwise([*names, ""]):
        uses.setdefault(name, set()).add(behind)
    return frozenset(name for name, behind in uses.items() if "weight" in behind <= {"weight", "bias"})


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


# What the indexers of two kinds of pools name beside that (`seams/chosen_keys/pools.py`): means, and sums by gates
_IN_MEAN_POOLS = frozenset({
    *("index_qk_proj", "q_layernorm", "k_layernorm", "index_head_dim", "index_kv_heads", "index_n_heads"),
    *("token_budget", "compress_ratio", "block_topk", "mean", "index_select", "nonzero", "numel", "scatter", "sum"),
    *("math", "sqrt", "range", "device", "flatten", "reshape", "full", "tensor", "where", "zeros"),
})  # fmt: skip
_IN_GATED_POOLS = frozenset({
    *("index_kpool", "index_kpool_always_select_tail", "index_kpool_compress_ape", "index_kpool_compress_gate"),
    *("get_pooled_states", "get_visible_tokens", "append_visible_tail", "get_seq_length", "keys", "layers", "linear"),
    *("softmax", "nan_to_num", "sum", "all", "any", "arange", "argmax", "clamp", "expand", "expand_as", "finfo"),
    *("device", "flatten", "full", "gather", "long", "lt", "pad", "remainder", "where"),
})  # fmt: skip
_BLOCK_CALL = "update_index"  # of a cache's layer: appends index keys, and returns all
_IN_BLOCK_INDEXERS = frozenset({
    _BLOCK_CALL,
    _TOP_KEYS,
    *("q_proj", "k_proj", "q_norm", "k_norm", "apply_rotary_pos_emb", "matmul", "masked_fill", "amax", "scatter_"),
    *("block_size", "topk_blocks", "local_blocks", "num_heads", "head_dim", "layer_idx", "layers"),
    *("F", "torch", "arange", "clamp", "device", "expand", "float", "min", "pad", "shape"),
    *("transpose", "unsqueeze", "view"),
})  # fmt: skip


@cache
def _names_read(kind: type[nn.Module]) -> frozenset[str]:
    """The names in a class's forward, and in those of its own methods that it calls."""
    names = set[str]()
    functions = [inspect.unwrap(kind.forward)]
    for function in functions:
        new = {*function.__code__.co_names} - names if isinstance(function, FunctionType) else set[str]()
        names |= new
        classes = [x for x in kind.__mro__ if issubclass(x, nn.Module) and x is not nn.Module]
        methods = [next((vars(x)[name] for x in classes if name in vars(x)), None) for name in new]
        functions += [inspect.unwrap(method) for method in methods if isinstance(method, FunctionType)]
    return frozenset(names)


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module chooses the keys that each row attends to, in a way that is known.

    Its forward must score the index keys of a cache, one by one, in pools or in blocks, and take the best, and name
    nothing beside what indexers of its kind do.
    """
    is_known = {_CACHE_CALL, _TOP_KEYS} <= _names_read(type(module)) <= _IN_INDEXERS
    return is_known or pools_keys(module) or chooses_blocks(module)


def pools_keys(module: nn.Module) -> bool:
    """Return whether an indexer scores pools of consecutive keys, and a row takes all keys of the best pools."""
    return _has_mean_pools(module) or has_gated_pools(module)


def _has_mean_pools(module: nn.Module) -> bool:
    return {_CACHE_CALL, _TOP_KEYS, "compress_ratio"} <= _names_read(type(module)) <= _IN_INDEXERS | _IN_MEAN_POOLS


def has_gated_pools(module: nn.Module) -> bool:
    """Return whether a pool is a sum of keys that is weighted by gates, and not their mean."""
    return {_CACHE_CALL, _TOP_KEYS, "index_kpool"} <= _names_read(type(module)) <= _IN_INDEXERS | _IN_GATED_POOLS


def chooses_blocks(module: nn.Module) -> bool:
    """Return whether an indexer chooses blocks of consecutive keys, others in each of its heads."""
    return {_BLOCK_CALL, _TOP_KEYS} <= _names_read(type(module)) <= _IN_BLOCK_INDEXERS


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


def reads_ngrams(module: nn.Module) -> bool:
    """Return whether a module embeds the tokens before a row together with its own."""
    return "ngram_embedding" in _names_read(type(module))


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


def makes_entries(module: Any) -> bool:
    """Return whether a module compresses windows of rows to keys, "entries", in a way that is known: its forward hands
    rows to a cache's layer and takes whole windows of them, and names nothing outside of `_IN_COMPRESSORS`.
    """
    return isinstance(module, nn.Module) and _WINDOW_CALLS <= _names_read(type(module)) <= _IN_COMPRESSORS


def chooses_entries(module: Any) -> bool:
    """Return whether a module makes entries of its own and takes the best of them for each row, in a way that is
    known.
    """
    if not isinstance(module, nn.Module):
        return False
    return {*_WINDOW_CALLS, _TOP_KEYS} <= _names_read(type(module)) <= _IN_ENTRY_INDEXERS


def reads_window_before(compressor: nn.Module) -> bool:
    """Return whether an entry is made of its own window and the one before it."""
    return _OVERLAP_CALL in _names_read(type(compressor))


def find_choosing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules that choose keys or entries, by name: their weights get no gradient."""
    return {name: module for name, module in model.named_modules() if is_indexer(module) or chooses_entries(module)}


def attends_to_entries(module: nn.Module) -> bool:
    """Return whether a module attends to the entries of its `compressor`, and an indexer in that is known."""
    compressor = getattr(module, "compressor", None)
    if not makes_entries(compressor) or "compressor" not in _names_read(type(module)):
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

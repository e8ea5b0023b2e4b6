"""What kinds of modules a model holds, told by classes and attributes alone: the file of a kind is not imported here.

peft is not imported either: its layers stand in place of the linears that they adapt, so that a prepared model's names
are those of the model inside a PeftModel.
"""

import inspect
import re
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError

ROWWISE_LAYER_TYPES = ("mlp", "moe")  # types of layers in which rows do not meet, as Nemotron-H names them


def class_forward(module: nn.Module) -> FunctionType:
    """Return the forward that its class defines, unwrapped; `prepare` refuses wrappers that are not transformers'."""
    return inspect.unwrap(type(module).forward)


# ---- mixers (`seams/mixers.py`)

CONVOLUTION = "causal_conv1d_fn"
SCANS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
_IN_MIXERS = frozenset({
    CONVOLUTION,
    *SCANS,
    "mamba2_split_conv1d_scan_combined",
    "apply_mask_to_padding_states",  # there is no mask
    "causal_conv1d_update",  # and what follows: steps of generation, with a cache
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
})  # fmt: skip


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the mixers of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_mixer(module)}


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module's class has a mixer's forward: a causal convolution, a scan or none, nothing unknown."""
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return False
    called = called_functions(class_forward(module))
    return CONVOLUTION in called and called <= _IN_MIXERS


def called_functions(forward: Any) -> set[str]:
    """Return the names of the functions outside of a class that its forward calls."""
    if not isinstance(forward, FunctionType):
        return set()
    globals_by_name = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {name for name, value in globals_by_name.items() if callable(value) and not isinstance(value, type)}


# ---- indexers, which choose a few keys for each row (`seams/indexers.py`)

_ASKS = "update_indexer"
_CHOOSES = "topk"
_IN_INDEXERS = frozenset({
    _ASKS,
    _CHOOSES,
    *("wq_b", "wk", "k_norm", "weights_proj", "q_input_norm", "softmax_scaling"),  # modules, each by rows
    *("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "relu", "matmul", "masked_fill"),
    *("head_dim", "index_topk", "layer_idx", "n_heads", "qk_rope_head_dim", "softmax_scale", "use_rope", "weight"),
    *("F", "torch", "bool", "dtype", "float", "int32", "indices", "min", "shape", "to"),
    *("cat", "split", "squeeze", "transpose", "unsqueeze", "view"),
})  # fmt: skip


def is_indexer(module: nn.Module) -> bool:
    """Return whether a class's forward scores the index keys of a cache, token by token, and does nothing unknown."""
    forward = class_forward(module)
    names = {*forward.__code__.co_names} if isinstance(forward, FunctionType) else set[str]()
    return {_ASKS, _CHOOSES} <= names <= _IN_INDEXERS


def find_indexers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the indexers of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_indexer(module)}


def is_indexed(module: nn.Module) -> bool:
    """Return whether a module attends to keys that a known indexer chose: its own, or that of a layer before."""
    forward = class_forward(module)
    indexer = getattr(module, "indexer", None)
    if not isinstance(forward, FunctionType) or "indexer" not in forward.__code__.co_names:
        return False
    return is_indexer(indexer) if indexer is not None else "prev_topk_indices" in forward.__code__.co_varnames


# ---- adapters (`adapters.py`)

_OF_ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save)\.")
# of two adapted parameters of a module the inner one's adapter is in a `base_layer`
_STANDS_FOR = re.compile(r"\.(base_layer(?!.*\.lora_)|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that adapts the module in its `base_layer`."""
    return hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")


def is_expert_adapter(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that adapts a parameter of experts (`target_parameters`)."""
    return is_adapted(module) and hasattr(module, "parameter_name")


def has_trained_copy(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that trains a copy of the module in its `original_module`."""
    return hasattr(module, "original_module") and hasattr(module, "adapter_layer_names")


def is_peft_module(module: nn.Module) -> bool:
    """Return whether a module is one that peft has put in place of a model's own."""
    return hasattr(module, "adapter_layer_names") and (is_adapted(module) or has_trained_copy(module))


def peft_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that peft has put in place of the model's own, by name."""
    return {name: module for name, module in model.named_modules() if is_peft_module(module)}


def adapter_dropout(model: nn.Module) -> float:
    """Return the largest dropout of the modules of adapters in a model."""
    dropouts = ((f".{path}.", m) for path, m in model.named_modules() if isinstance(m, nn.Dropout))
    return max((m.p for path, m in dropouts if ".lora_dropout." in path), default=0.0)


def base_module(module: nn.Module) -> nn.Module:
    """Return the model's own module inside an adapted one; a module that is not adapted is returned as it is."""
    return module.base_layer if is_adapted(module) else module  # pyright: ignore[reportReturnType]


def unwrap_peft_model(model: nn.Module) -> nn.Module:
    """Take the transformers model out of a PeftModel; another model is returned. ModelError for no LoRA around one."""
    if type(model).__module__.partition(".")[0] != "peft":
        return model
    inside = model.get_base_model() if hasattr(model, "get_base_model") else None  # pyright: ignore[reportCallIssue]
    if not isinstance(inside, PreTrainedModel):
        raise ModelError(
            f"prepare takes a PeftModel with a LoRA adapter around a transformers model, got {type(model).__name__}; "
            "use peft.get_peft_model(model, peft.LoraConfig(…))"
        )
    return inside


def adapter_of_prepared_model(model: nn.Module) -> Any:
    """Return the Adapter of a prepared model; None if it has none."""
    return getattr(model, "adapter", None)


def belongs_to_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's: a matrix of it, or a module's copy that is trained.

    >>> belongs_to_adapter("layers.0.q_proj.lora_A.default.weight"), belongs_to_adapter("q_proj.base_layer.weight")
    (True, False)
    """
    return bool(_OF_ADAPTER.search(name))


def name_without_adapter(name: str) -> str:
    """Return a parameter's name in the model without an adapter; a trained copy of a module has the original's.

    >>> name_without_adapter("layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    >>> name_without_adapter("lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    return _STANDS_FOR.sub("", name)


# ---- what `prepare` has made


def is_pipeline(model: nn.Module) -> bool:
    """Return whether a model is a PipelineModel: this rank's stages of one."""
    return getattr(type(model), "holds_stages", False)


def is_multimodal(model: nn.Module) -> bool:
    """Return whether a model is a MultimodalModel: a language model with encoders."""
    return getattr(type(model), "holds_encoders", False)


def find_language_model(model: Any) -> nn.Module:
    """Find the language model of a MultimodalModel; any other model is its own."""
    return model.language_model if is_multimodal(model) else model


def modules_and_worlds(model: Any, world: World) -> list[tuple[nn.Module, World]]:
    """Return (module, its world) of each part of a model with a layout of its own, the language model first."""
    if not is_multimodal(model):
        return [(model, world)]
    encoders = [(encoder.module, encoder.world) for encoder in model.encoder_settings.values()]
    return [(model.language_model, world), *encoders]


IS_COMPILED = "is_compiled_layer"


FLOAT8_WEIGHTS = "float8_weights"


def find_float8_weight(module: nn.Module, name: str) -> Any:
    """Return the Float8Weight of a module's weight; None if the module does not compute with it in float8."""
    return vars(module).get(FLOAT8_WEIGHTS, {}).get(name)


def keep_float8_weights(model: nn.Module) -> AbstractContextManager[None]:
    """Keep a model's weights in float8, if it has any, for passes between which no weight changes."""
    if not any(FLOAT8_WEIGHTS in vars(module) for module in model.modules()):
        return nullcontext()
    return import_module("longspan.model.float8.products").keep_quantised_weights(model)


PACKED_WEIGHTS = "packed_weights"


def packed_weight(module: nn.Module, name: str) -> Any:
    """Return the PackedWeight of a module's frozen weight in 4 or 8 bits; None if the weight is whole."""
    return vars(module).get(PACKED_WEIGHTS, {}).get(name)


def packed_weights(model: nn.Module) -> dict[str, Any]:
    """Return the PackedWeights inside a model, by the qualified names of their parameters."""
    return {
        f"{path}.{name}": record
        for path, module in model.named_modules()
        for name, record in vars(module).get(PACKED_WEIGHTS, {}).items()
    }


HOST_STORE = "host_store"  # an attribute of parameters, and of prepared models
_NORM = "norm_on_device"


def waits_on_host(parameter: nn.Parameter) -> bool:
    """Return whether this rank's part of a parameter, and its gradient's, lie in the host's memory between steps."""
    return HOST_STORE in vars(parameter)


def has_weights_on_host(model: nn.Module) -> bool:
    """Return whether weights of a prepared model wait on the host."""
    return HOST_STORE in vars(model)


def note_norm(gradient: Any, norm: Tensor) -> None:
    """Note the 2-norm of this rank's part of a gradient on the host, for `norm_on_device`."""
    vars(gradient)[_NORM] = norm, (gradient._version, gradient._local_tensor._version)


def norm_on_device(gradient: Any) -> Tensor | None:
    """Return the 2-norm that was noted, if nothing has written to the gradient since, nor to its part on this rank."""
    norm, versions = vars(gradient).get(_NORM, (None, None))
    return norm if norm is not None and versions == (gradient._version, gradient._local_tensor._version) else None

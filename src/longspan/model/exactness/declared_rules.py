"""What a model declares, in its configuration and modules, and what of it cannot run exactly over a sharded sequence.

Each rule is one function from a model to the reasons why it cannot. Rules of adapters are in `adapter_rules.py`; what
only a forward pass shows in `seams/meta_pass.py`; what only numbers show in the trials.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import base_model, decoder_layers, layer_list, reads_other_modalities, text_model
from longspan.model.mtp.depths import find_copied_layer, model_depths
from longspan.model.seams.attention_calls import has_temperature, is_llama4_temperature
from longspan.model.seams.forwards.rope_by_length import depends_on_length, types_by_length
from longspan.model.seams.mixers import ROWWISE_LAYER_TYPES, find_mixers, is_mixer
from longspan.model.seams.refusals import doctor_hint, find_set_forwards, is_wrapped_by_others, items_text
from longspan.model.seams.rope import rope_types
from longspan.model.weights.hf_folder import DEQUANTIZE

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

_MIXING = ("linear_attention", "conv", "hybrid", "mamba")  # types of layers that may contain a mixer

_KNOWN_MIXERS = ", gated delta nets, Kimi's delta attention, Mamba 2 and short convolutions"


def refuse_unsupported(model: nn.Module) -> None:
    """Raise ModelError, with every reason, where a model cannot run exactly over a sharded sequence."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"prepare takes a transformers model (PreTrainedModel), got {type(model).__name__}; "
            "a model of your own calls longspan.attend itself and needs no prepare"
        )
    refuse_quantized(model)
    reasons = [*_architecture_reasons(model)]
    if model.config.return_dict is False:
        reasons.append(
            "return_dict is False, so that hidden states come without a name; set model.config.return_dict = True"
        )
    reasons += _forward_reasons(model)
    text_rules = (_rope_reasons, _temperature_reasons, _layer_type_reasons, _convolution_reasons)
    reasons += [reason for rule in text_rules for reason in rule(text_model(model))]
    if reasons:
        raise ModelError(
            f"{type(model).__name__} cannot run exactly over a sharded sequence: {'; '.join(reasons)}"
            f"{doctor_hint(model)}"
        )


def refuse_quantized(model: nn.Module) -> None:
    """Raise ModelError for a model whose parameters are codes of weights, by transformers' mark or their own type."""
    method = getattr(model, "is_quantized", False) and (getattr(model, "quantization_method", None) or "transformers")
    codes = (name for name, p in model.named_parameters() if not p.is_floating_point() or p.element_size() == 1)
    if reason := method or next(codes, ""):
        name = getattr(reason, "value", reason)
        raise ModelError(f"{type(model).__name__} is quantized ({name}), and whole weights are trained; {DEQUANTIZE}")


def _architecture_reasons(model: PreTrainedModel) -> Iterator[str]:
    """A class's name tells its head; wrappers of several modalities are called ForConditionalGeneration."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder, only decoder-only language models are supported"
        return
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    text_config = type(config.get_text_config())
    use = f"use {classes[text_config].__name__ if text_config in classes else 'the causal language model'}"
    several = reads_other_modalities(model)
    head = re.search(r"For(?!CausalLM)[A-Z]\w+$", name)
    if head and not (several and head.group() == "ForConditionalGeneration"):
        yield f"its head ({head.group()}) is not a language model's; {use}"
    if several and (model.get_output_embeddings() is None or text_model(model) in (model, base_model(model))):
        yield f"its text model, inside a model of several modalities, is not found; {use}"
    if getattr(config, "add_cross_attention", False):
        yield "add_cross_attention is set, cross attention is not supported"


def _forward_reasons(model: PreTrainedModel) -> Iterator[str]:
    mixers = find_mixers(model)
    replaced = {"the model itself": model, **mixers}
    # Rotary modules whose frequencies depend on a document's length:
    replaced |= {name: module for name, module in model.named_modules() if types_by_length(module)}
    # Where the layers of multi-token prediction take arguments that are made from token ids, longspan calls the module
    # around the layers once more, with the ids that these layers predict from.
    if model_depths(model) and find_copied_layer(model).of_tokens:
        parent_of_layers = layer_list(model)[0].rpartition(".")[0]
        replaced[parent_of_layers] = model.get_submodule(parent_of_layers)
    if names := find_set_forwards(replaced.items()):
        yield (
            f"{items_text(names)} has a forward set on the instance (module.forward = …, or accelerate's hooks), which "
            "would be left out; define it in a subclass, or use a forward hook"
        )
    wrapped = [f"{name} ({type(mixer).__name__})" for name, mixer in mixers.items() if is_wrapped_by_others(mixer)]
    if wrapped:
        yield (
            f"{items_text(wrapped)} has a forward in a wrapper that is not transformers' own, which would be left out; "
            "use a forward hook"
        )


def _temperature_reasons(model: PreTrainedModel) -> Iterator[str]:
    """Only Llama 4's formula is computed by positions."""
    modules = model.named_modules()
    if names := [name for name, module in modules if has_temperature(module) and not is_llama4_temperature(module)]:
        yield (
            f"{items_text(names)} scales queries by a row's number (attn_temperature_tuning) without floor_scale and "
            "attn_scale, from which it could be computed by the row's position; set attn_temperature_tuning to False"
        )


def _rope_reasons(model: PreTrainedModel) -> Iterator[str]:
    """Modules that name their type in `rope_type` can choose frequencies by document: `rope_by_length.py` runs them."""
    if any(hasattr(module, "rope_type") for module in model.modules()):
        return
    config = model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    for kind in sorted(filter(depends_on_length, rope_types(rope))):
        yield (
            f"rope type {kind!r} chooses frequencies by the longest position of a call, and no module of the model has "
            "a rope_type that says where; use default, linear, llama3 or yarn"
        )


def _layer_type_reasons(model: PreTrainedModel) -> Iterator[str]:
    types = getattr(model.config, "layer_types", None) or []
    mixing = {i for i, layer in enumerate(decoder_layers(model).values()) if any(map(is_mixer, layer.modules()))}
    for kind in sorted({str(kind) for kind in types} - {*_LAYER_TYPES, *ROWWISE_LAYER_TYPES}):
        layers = [i for i, layer_type in enumerate(types) if layer_type == kind and i not in mixing]
        if not layers:
            continue
        supported = f"supported are {', '.join(_LAYER_TYPES)}{_KNOWN_MIXERS if kind in _MIXING else ''}"
        yield f"layers {items_text(layers)} are of type {kind!r}, {supported}"


def _convolution_reasons(model: PreTrainedModel) -> Iterator[str]:
    mixers = tuple(f"{name}." for name in find_mixers(model))
    convolutions = (name for name, module in model.named_modules() if isinstance(module, nn.Conv1d))
    if names := [name for name in convolutions if not name.startswith(mixers)]:
        owners = sorted({type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names})
        yield f"{items_text(names)} (Conv1d of {', '.join(owners)}) mixes neighbouring rows outside attention"

"""The one answer to "may this model run?": `check_model`, with the rules for what a model declares.

What only a pass shows is in `seams/meta_pass.py`, what numbers show in the trials beside this file.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.exactness.class_trial import ClassTrial, try_small_model_of_class
from longspan.model.feature import Feature
from longspan.model.kinds import (
    ROWWISE_LAYER_TYPES,
    attends_to_chosen_keys,
    attends_to_entries,
    find_choosing_modules,
    find_mixers,
    has_experts,
    is_mixer,
    makes_entries,
    reads_ngrams,
    score_columns,
)
from longspan.model.layers import (
    base_model,
    decoder_layers,
    innermost_decoder,
    reads_other_modalities,
    text_model,
)
from longspan.model.seams.attention_calls import scales_queries_by_row
from longspan.model.seams.call_rules import is_prepared
from longspan.model.seams.doctor_hint import doctor_hint
from longspan.model.seams.rope import depends_on_length, length_dependent_types, rope_types
from longspan.model.seams.set_forwards import is_wrapped_by_others, modules_with_instance_forward
from longspan.plain_text import items_text
from longspan.plan.shape.families import find_family
from longspan.plan.shape.layers import INDEXED
from longspan.plan.shape.quantization import DEQUANTIZE

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

_MIXING = ("linear_attention", "conv", "hybrid", "mamba")  # types of layers that may contain a mixer

_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
_BLOCKS = "minimax_m3_sparse"

# Each value says what is missing for layers of this type, whose keys are chosen.
_CHOSEN_KEYS = {
    **dict.fromkeys(INDEXED, "whose indexer does more than to score keys one by one, or pools of them"),
    **dict.fromkeys(_COMPRESSED, "whose keys are made of windows of rows in a way that is not known"),
    _BLOCKS: "whose indexer does more than to score blocks by their best keys",
}
_IS_KNOWN = {
    **dict.fromkeys((*INDEXED, _BLOCKS), attends_to_chosen_keys),
    **dict.fromkeys(_COMPRESSED, attends_to_entries),
}
_KNOWN_MIXERS = ", gated delta nets, Kimi's delta attention, Mamba 2 and short convolutions"


def refuse_quantized(model: nn.Module) -> None:
    """Raise ModelError for a model whose parameters are codes of weights, by transformers' mark or their own type."""
    method = getattr(model, "is_quantized", False) and (
        getattr(model, "quantization_method", None) or "transformers"
    )
    codes = (name for name, p in model.named_parameters() if not p.is_floating_point() or p.element_size() == 1)
    if reason := method or next(codes, ""):
        name = getattr(reason, "value", reason)  # transformers' method may be an enum
        raise ModelError(
            f"{type(model).__name__} is quantized ({name}), and whole weights are trained; for an adapter over linears "
            f'of bitsandbytes call prepare(…, frozen="stored"), or read the folder by load_model(folder, '
            f"quantized=True), or {DEQUANTIZE}"
        )


def _architecture_reasons(model: PreTrainedModel) -> Iterator[str]:
    """A class's name tells its head; wrappers of several modalities are called ForConditionalGeneration."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder, only decoder-only language models are supported"
        return
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    text_config = type(config.get_text_config())
    use = f"use {classes[text_config].__name__ if text_config in classes else 'the causal language model'}"
    several = reads_other_modalities(model)
    head = re.search(r"For(?!CausalLM)[A-Z]\w+$", name)
    if score_columns(model):
        if several or find_family(config.model_type).prefix_rows:
            yield "its head scores, and its text model is a part of it, or sees a prefix whole; use one of text alone"
    elif head and not (several and head.group() == "ForConditionalGeneration"):
        yield f"its head ({head.group()}) is not a language model's; {use}"
    # Where the text model is not told apart from what is around it, `text_model` finds the model or its base.
    if several and (model.get_output_embeddings() is None or text_model(model) in (model, base_model(model))):
        yield f"its text model, inside a model of several modalities, is not found; {use}"
    if getattr(config, "add_cross_attention", False):
        yield "add_cross_attention is set, cross attention is not supported"


def _forward_reasons(model: PreTrainedModel) -> Iterator[str]:
    """In place of these forwards longspan runs its own, made of the class's forward."""
    mixers = find_mixers(model)
    replaced = {"the model itself": model, **mixers, **find_choosing_modules(model)}
    replaced |= {name: module for name, module in model.named_modules() if makes_entries(module)}
    replaced |= {name: module for name, module in model.named_modules() if length_dependent_types(module)}
    if names := modules_with_instance_forward(replaced.items()):
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


def _position_reasons(model: PreTrainedModel) -> Iterator[str]:
    """`seams/rope.py` chooses frequencies by document in modules that name their type in `rope_type`."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    can_choose = any(hasattr(module, "rope_type") for module in model.modules())
    inexact_kinds = [] if can_choose else sorted(filter(depends_on_length, rope_types(rope)))
    for kind in inexact_kinds:
        yield (
            f"rope type {kind!r} chooses frequencies by the longest position of a call, and no module of the model has "
            "a rope_type that says where; use default, linear, llama3 or yarn"
        )
    # longspan computes Llama 4's formula alone by positions, and these are its constants.
    constants = ("floor_scale", "attn_scale")
    scaling = {name: module for name, module in model.named_modules() if scales_queries_by_row(module)}
    if names := [
        n for n, m in scaling.items() if not all(isinstance(getattr(m, c, None), int | float) for c in constants)
    ]:
        yield (
            f"{items_text(names)} scales queries by a row's number (attn_temperature_tuning) without floor_scale and "
            "attn_scale, from which it could be computed by the row's position; set attn_temperature_tuning to False"
        )


def _layer_reasons(model: PreTrainedModel) -> Iterator[str]:
    types = getattr(model.config, "layer_types", None) or []
    for kind in sorted({str(kind) for kind in types} - {*_LAYER_TYPES, *ROWWISE_LAYER_TYPES}):
        is_known = _IS_KNOWN.get(kind, is_mixer)
        layers = [
            index
            for index, layer in enumerate(decoder_layers(model).values())
            # a slice, as a configuration may have fewer types than layers
            if types[index : index + 1] == [kind] and not any(map(is_known, layer.modules()))
        ]
        supported = f"supported are {', '.join(_LAYER_TYPES)}{_KNOWN_MIXERS if kind in _MIXING else ''}"
        if layers:
            yield f"layers {items_text(layers)} are of type {kind!r}, {_CHOSEN_KEYS.get(kind, supported)}"
    without_tail = [n for n, m in model.named_modules() if not getattr(m, "index_kpool_always_select_tail", True)]
    if without_tail:
        yield (
            f"{items_text(without_tail)} leaves out the keys after a row's last pool (index_kpool_always_select_tail "
            "is False): the first rows of a document then see no key, and transformers' eager attention gives them the "
            "mean of all values, those of later rows too; set it to True"
        )
    if names := [name for name, module in model.named_modules() if reads_ngrams(module)]:
        owners = sorted({type(model.get_submodule(name)).__name__ for name in names})
        yield (
            f"{items_text(names)} ({', '.join(owners)}) embeds n-grams: a row's token with those before it, which "
            "another rank or another document may hold; leave these layers out of the configuration"
        )
    mixers = tuple(f"{name}." for name in find_mixers(model))
    convolutions = (name for name, module in model.named_modules() if isinstance(module, nn.Conv1d))
    if names := [name for name in convolutions if not name.startswith(mixers)]:
        owners = sorted({type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names})
        yield f"{items_text(names)} (Conv1d of {', '.join(owners)}) mixes neighbouring rows outside attention"


def check_model(model: nn.Module, features: Sequence[Feature]) -> tuple[str, ...]:
    """Return the random draws of a model's class; raise ModelError, naming layers and settings, for a model that cannot
    run exactly over a sharded sequence. Entered by all ranks.

    In order: what it declares, a small copy of its class, its features, and what ranks must not differ in. A pass of
    the connected model on the meta device follows (`seams/meta_pass.py`), and `row_trial.py` tries the placed model;
    images, encoders, stages and the loss by rows are tried where they are made.
    """
    if is_prepared(model):
        raise ModelError(f"this {type(model).__name__} was prepared already; prepare a model once")
    with ExitStack() as contexts:
        for feature in features:
            contexts.enter_context(feature.checks_context(model))
        class_draws = check_model_on_this_rank(model, features)
        # `check_model_on_this_rank` refused other classes.
        assert isinstance(model, PreTrainedModel)
        for feature in features:  # last, as each rank has passed its own checks
            feature.check_same_on_all_ranks(model)
    return class_draws


def check_model_on_this_rank(model: nn.Module, features: Sequence[Feature]) -> tuple[str, ...]:
    """Return the random draws of a model's class; raise ModelError as `check_model` for what a rank can tell alone.

    The error names all reasons in what a model declares, or else those of its class or of one feature. A small copy is
    run of a class with experts, and of one that is not transformers'.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"prepare takes a transformers model (PreTrainedModel), got {type(model).__name__}; "
            "a model of your own calls longspan.attend itself and needs no prepare"
        )
    refuse_quantized(model)
    inexact = f"{type(model).__name__} cannot run exactly over a sharded sequence"
    reasons = [*_architecture_reasons(model)]
    if model.config.return_dict is False:
        reasons.append(
            "return_dict is False, so that hidden states come without a name; set model.config.return_dict = True"
        )
    text = text_model(model)
    reasons += [*_forward_reasons(model), *_position_reasons(text), *_layer_reasons(text)]
    if reasons:
        raise ModelError(f"{inexact}: {'; '.join(reasons)}{doctor_hint(model)}")
    trial = ClassTrial()
    if has_experts(model) or not type(innermost_decoder(model)).__module__.startswith("transformers."):
        trial = try_small_model_of_class(model)
    if trial.reasons:
        raise ModelError(f"{inexact}: {'; '.join(trial.reasons)}")
    for feature in features:
        feature.refuse(model)
    return trial.draws

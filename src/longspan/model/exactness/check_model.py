"""The one answer to "may this model run?": `check_model`, with its rules and the trial of a small copy of the class.

What only a pass shows is in `seams/meta_pass.py`, what numbers of the placed model show in `row_trial.py`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.exactness.small_copies import (
    parameter_gradients,
    relative_error,
    run_trial_once,
    shrink_configuration,
    trial_error_text,
)
from longspan.model.features import Feature
from longspan.model.kinds import ROWWISE_LAYER_TYPES, find_indexers, find_mixers, is_indexed, is_mixer
from longspan.model.layers import (
    base_model,
    decoder_layers,
    expert_modules,
    has_experts,
    innermost_decoder,
    reads_other_modalities,
    score_columns,
    text_model,
)
from longspan.model.seams.attention_calls import attend_separately, defer_temperature, has_temperature
from longspan.model.seams.call_rules import (
    doctor_hint,
    has_bidirectional_prefix,
    is_prepared,
    is_wrapped_by_others,
    items_text,
    modules_with_instance_forward,
)
from longspan.model.seams.rope import depends_on_length, length_dependent_types, rope_types
from longspan.model.weights.hf_folder import DEQUANTIZE
from longspan.plan.shape.layers import INDEXED

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

_MIXING = ("linear_attention", "conv", "hybrid", "mamba")  # types of layers that may contain a mixer

_CHOSEN_KEYS = {  # what is missing for other layers whose keys are chosen
    **dict.fromkeys(INDEXED, "whose indexer does more than to score keys one by one (it pools them, say)"),
    **dict.fromkeys(
        ("compressed_sparse_attention", "heavily_compressed_attention"),
        "whose keys are compressed from windows of rows, which other ranks may hold",
    ),
    "minimax_m3_sparse": "which choose blocks of keys for each key/value head, and not keys for each row",
}
_KNOWN_MIXERS = ", gated delta nets, Kimi's delta attention, Mamba 2 and short convolutions"


def refuse_unsupported_model(model: nn.Module) -> None:
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
    if score_columns(model):
        if several or has_bidirectional_prefix(config):
            yield "its head scores, and its text model is a part of it, or sees a prefix whole; use one of text alone"
    elif head and not (several and head.group() == "ForConditionalGeneration"):
        yield f"its head ({head.group()}) is not a language model's; {use}"
    if several and (model.get_output_embeddings() is None or text_model(model) in (model, base_model(model))):
        yield f"its text model, inside a model of several modalities, is not found; {use}"
    if getattr(config, "add_cross_attention", False):
        yield "add_cross_attention is set, cross attention is not supported"


def _forward_reasons(model: PreTrainedModel) -> Iterator[str]:
    mixers = find_mixers(model)
    replaced = {"the model itself": model, **mixers, **find_indexers(model)}
    # Rotary modules whose frequencies depend on a document's length:
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


def _temperature_reasons(model: PreTrainedModel) -> Iterator[str]:
    constants = ("floor_scale", "attn_scale")  # of Llama 4's formula, which alone is computed by positions
    scaling = {name: module for name, module in model.named_modules() if has_temperature(module)}
    if names := [
        n for n, m in scaling.items() if not all(isinstance(getattr(m, c, None), int | float) for c in constants)
    ]:
        yield (
            f"{items_text(names)} scales queries by a row's number (attn_temperature_tuning) without floor_scale and "
            "attn_scale, from which it could be computed by the row's position; set attn_temperature_tuning to False"
        )


def _rope_reasons(model: PreTrainedModel) -> Iterator[str]:
    # Modules that name their type in `rope_type` can choose frequencies by document (`seams/rope.py`).
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
    for kind in sorted({str(kind) for kind in types} - {*_LAYER_TYPES, *ROWWISE_LAYER_TYPES}):
        is_known = is_indexed if kind in INDEXED else is_mixer
        layers = [
            index
            for index, layer in enumerate(decoder_layers(model).values())
            if types[index : index + 1] == [kind] and not any(map(is_known, layer.modules()))
        ]
        if not layers:
            continue
        supported = f"supported are {', '.join(_LAYER_TYPES)}{_KNOWN_MIXERS if kind in _MIXING else ''}"
        supported = _CHOSEN_KEYS.get(kind, supported)
        yield f"layers {items_text(layers)} are of type {kind!r}, {supported}"


def _convolution_reasons(model: PreTrainedModel) -> Iterator[str]:
    mixers = tuple(f"{name}." for name in find_mixers(model))
    convolutions = (name for name, module in model.named_modules() if isinstance(module, nn.Conv1d))
    if names := [name for name in convolutions if not name.startswith(mixers)]:
        owners = sorted({type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names})
        yield f"{items_text(names)} (Conv1d of {', '.join(owners)}) mixes neighbouring rows outside attention"


_STAND_IN = "longspan_separate_rows"
_ROWS, _EXPERTS = 48, 8
_PIECES = (slice(0, 1), slice(1, 30), slice(30, _ROWS))  # of unequal sizes, one of a single row
_TOLERANCE = 1e-4  # relative; many routers and norms compute in float32, whatever the model's type


@dataclass(frozen=True)
class ClassTrial:
    """Reasons why rows are not computed each by itself, and random draws in training."""

    reasons: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()


def refuse_inexact_class(model: PreTrainedModel) -> tuple[str, ...]:
    """Raise ModelError, with every reason, for a model of a class that would not be exact; returns its random draws."""
    trial = try_small_model_of_class(model)
    if trial.reasons:
        raise ModelError(
            f"{type(model).__name__} cannot run exactly over a sharded sequence: {'; '.join(trial.reasons)}"
        )
    return trial.draws


def try_small_model_of_class(model: PreTrainedModel) -> ClassTrial:
    """Try a small model of a model's class, once for each configuration. The model itself is not touched."""
    base = innermost_decoder(model)
    key = "class", type(base), base.config.to_json_string()
    return run_trial_once(key, lambda: _try_small_copy(type(base), base.config, required=has_experts(model)))


def _try_small_copy(kind: type[PreTrainedModel], config: PreTrainedConfig, *, required: bool) -> ClassTrial:
    # A class that draws at random in training is compared in evaluation mode: draws would differ from pass to pass.
    # That a small model cannot be made or run is a reason only where the trial is required, of a class with experts.
    try:
        model = _make_small_model(kind, config)
        outs: list[Tensor] = []
        ids, positions = torch.arange(_ROWS)[None], torch.full((1, _ROWS), 3)
        for seed in (1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                outs.append(model(input_ids=ids, position_ids=positions, use_cache=False)[0])
        draws = not torch.equal(*outs)
        seen = ("numbers by which a small model of its class differs from seed to seed",) if draws else ()
        return ClassTrial(tuple(_row_reasons(model.train(not draws))), seen)
    except Exception as error:  # whatever a constructor or a forward raises
        if not required:
            return ClassTrial()
        reason = (
            f"a small {kind.__name__} that shows how they route cannot be run on the host ({trial_error_text(error)})"
        )
        return ClassTrial((f"it has experts, and {reason}",))


def _make_small_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    small = shrink_configuration(config, experts=_EXPERTS)
    torch.manual_seed(0)
    settings: Any = {"attn_implementation": _STAND_IN, "experts_implementation": "eager", "dtype": torch.float32}
    model = kind._from_config(small, **settings).double()
    defer_temperature(model)  # attention's business: it is not tried here
    if find_indexers(model):
        from longspan.model.seams.indexers import shard_indexers

        shard_indexers(model, alone=True)
    for mixer in find_mixers(model).values():
        from longspan.model.seams.mixers import ROWS_ALONE, set_mixer_ops

        set_mixer_ops(mixer, lambda *_: ROWS_ALONE)
    for parameter in model.parameters():  # biases begin as zeros, which would hide them
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


AttentionInterface.register(
    _STAND_IN, lambda _, q, k, v, attention_mask, **more: (attend_separately(q, k, v, more.get("scaling")), None)
)


class _Pass(NamedTuple):
    rows: Tensor  # (R, D)
    gradients: dict[str, Tensor | None]
    outputs: dict[str, list[Tensor]]  # of modules, (R, …) each, in the order in which they were called


def _run_rows_in_order(model: PreTrainedModel, order: Tensor) -> _Pass:
    """A row's number in `order` is its token id, and seeds its gradient."""
    outputs: dict[str, list[Tensor]] = {}
    torch.manual_seed(0)
    upstream = torch.randn(_ROWS, model.config.get_text_config().hidden_size, dtype=torch.float64)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(
                lambda _, __, out, name=name: outputs.setdefault(name, []).extend(_row_tensors(out, len(order)))
            )
            hooks.callback(hook.remove)
        positions = torch.full((1, len(order)), 3)
        out = model(input_ids=order[None], position_ids=positions, use_cache=False)[0][0]
    gradients = parameter_gradients((out * upstream[order]).sum(), model.named_parameters())
    return _Pass(out.detach(), gradients, outputs)


def _row_tensors(out: Any, rows: int) -> Iterator[Tensor]:
    # Those of shape (R, …) or (1, R, …), each as (R, ·).
    for leaf in tree_leaves(out if isinstance(out, tuple | list) else [out]):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf = leaf.detach()
            if leaf.ndim > 1 and leaf.shape[0] == rows:
                yield leaf.flatten(1)
            elif leaf.ndim > 2 and leaf.shape[:2] == (1, rows):
                yield leaf[0].flatten(1)


def _row_reasons(model: PreTrainedModel) -> Iterator[str]:
    # Gradients and experts are compared only if outputs are equal, since other outputs have other gradients.
    # Buffers that are not saved may only log what was run; if results depend on them, rows differ below.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name in model.state_dict()}
    all_rows = _run_rows_in_order(model, torch.arange(_ROWS))
    order = torch.randperm(_ROWS)
    pieces = [_run_rows_in_order(model, order[piece]) for piece in _PIECES]
    evidence = f"(found with a small {type(model).__name__} of {_ROWS} rows, whole and in {len(pieces)} pieces)"
    buffers_after = dict(model.named_buffers())
    if changed := [name for name, buffer in buffers.items() if not torch.equal(buffers_after[name], buffer)]:
        yield f"its forward pass in training changes {changed[0]} by the rows that it is given {evidence}"
    error = relative_error(torch.cat([piece_pass.rows for piece_pass in pieces]), all_rows.rows[order])
    if error > _TOLERANCE:
        first = _first_differing_module(all_rows, pieces, order)
        yield (
            f"rows influence each other outside attention, first in {first}: outputs differ by {error:.1e} {evidence}"
        )
        return
    yield from _gradient_reasons(all_rows, pieces, evidence)
    yield from _expert_reasons(model)


def _first_differing_module(whole: _Pass, parts: Sequence[_Pass], order: Tensor) -> str:
    # A module that is not called equally often for each piece cannot be compared.
    for name, outs in whole.outputs.items():
        for i, out in enumerate(outs):
            pieces = [piece_pass.outputs[name][i] for piece_pass in parts if i < len(piece_pass.outputs.get(name, ()))]
            if name and len(pieces) == len(parts) and relative_error(torch.cat(pieces), out[order]) > _TOLERANCE:
                return name
    return "an unknown place"


def _gradient_reasons(whole: _Pass, parts: Sequence[_Pass], evidence: str) -> Iterator[str]:
    # Of what nothing depends on here, as of learnt rotary frequencies at one position, only rounding is left.
    least = 1e-9 * max((float(x.abs().max()) for x in whole.gradients.values() if x is not None), default=0.0)
    for name, gradient in whole.gradients.items():
        pieces = [piece for piece_pass in parts if (piece := piece_pass.gradients[name]) is not None]
        if gradient is not None and len(pieces) < len(parts):
            yield (
                f"{name} has no gradient, not even zeros, where no row of a rank visits it, and ranks would add "
                f"different parameters {evidence}"
            )
            return
        if gradient is not None and (error := relative_error(torch.stack(pieces).sum(0), gradient, least)) > _TOLERANCE:
            yield f"the gradient of {name} is not the sum over rows: it differs by {error:.1e} {evidence}"
            return


@torch.no_grad()
def _expert_reasons(model: PreTrainedModel) -> Iterator[str]:
    for name, module in expert_modules(model).items():
        from longspan.model.experts.moe import mix_experts

        experts: Any = module
        x = torch.randn(_ROWS, model.config.get_text_config().hidden_size, dtype=torch.float64)
        chosen = torch.rand(_ROWS, int(experts.num_experts)).topk(min(2, int(experts.num_experts))).indices
        weights = torch.rand(chosen.shape, dtype=torch.float64)
        error = relative_error(mix_experts(experts, x, chosen, weights), experts(x, chosen, weights))
        if error > _TOLERANCE:
            yield f"{name} ({type(experts).__name__}) computes something of its own: ours differs by {error:.1e}"
            return


def check_model(model: nn.Module, features: Sequence[Feature]) -> tuple[str, ...]:
    """Raise ModelError, naming layers and settings, for a model that cannot run exactly over a sharded sequence.

    In order: what it declares, a small copy of its class, its features, and what ranks must not differ in. A pass of
    the connected model on the meta device follows (`seams/meta_pass.py`), and `row_trial.py` tries the placed model;
    images, encoders, stages and the loss by rows are tried where they are made. Returns random draws of the class.
    """
    if is_prepared(model):
        raise ModelError(f"this {type(model).__name__} was prepared already; prepare a model once")
    with ExitStack() as contexts:
        for feature in features:
            contexts.enter_context(feature.checks_context(model))
        class_draws = check_unconnected(model, features)
        assert isinstance(model, PreTrainedModel)  # others were refused
        for feature in features:  # last, as each rank has passed its own checks
            feature.compare_ranks(model)
    return class_draws


def check_unconnected(model: nn.Module, features: Sequence[Feature]) -> tuple[str, ...]:
    """Raise ModelError as `check_model` for what a rank tells alone; returns random draws of the class."""
    refuse_unsupported_model(model)
    assert isinstance(model, PreTrainedModel)  # others were refused
    class_draws = refuse_inexact_class(model) if needs_class_trial(model) else ()
    for feature in features:
        feature.refuse(model)
    return class_draws


def needs_class_trial(model: PreTrainedModel) -> bool:
    """Whether a small copy of the class is tried: of one with experts, or that is not transformers' own."""
    return has_experts(model) or not type(innermost_decoder(model)).__module__.startswith("transformers.")

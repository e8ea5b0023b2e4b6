"""The one answer to "may this model run?": `check_model`, with its rules and the trial of a small copy of the class.

What only a pass shows is in `seams/meta_pass.py`, what numbers of the placed model show in `row_trial.py`.
"""

import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel

from longspan.attention import AttendCall
from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.adapters import (
    Adapter,
    adapter_parameters,
    base_module,
    belongs_to_adapter,
    find_adapter,
    has_trained_copy,
    is_adapted,
    peft_modules,
)
from longspan.model.exactness.small_copies import (
    parameter_gradients,
    relative_error,
    run_trial_once,
    shrink_configuration,
    trial_error_text,
)
from longspan.model.experts.moe import mix_experts
from longspan.model.layers import (
    SCORE_HEADS,
    base_model,
    decoder_layers,
    expert_modules,
    has_experts,
    innermost_decoder,
    reads_other_modalities,
    score_columns,
    text_model,
)
from longspan.model.mtp import depth_reasons, model_depths, select_depth_weights, unwrap_trained_depths_or_undo
from longspan.model.parts import is_tied
from longspan.model.seams.attention_calls import (
    attend_separately,
    defer_temperature,
    find_indexers,
    has_temperature,
    is_indexed,
)
from longspan.model.seams.call_rules import (
    doctor_hint,
    has_bidirectional_prefix,
    is_prepared,
    is_wrapped_by_others,
    items_text,
    modules_with_instance_forward,
)
from longspan.model.seams.indexers import shard_indexers
from longspan.model.seams.meta_pass import MetaRecord, check_kernel_for_calls, record_calls_and_draws
from longspan.model.seams.mixers import ROWS_ALONE, ROWWISE_LAYER_TYPES, find_mixers, is_mixer, set_mixer_ops
from longspan.model.seams.rope import depends_on_length, length_dependent_types, rope_types
from longspan.model.sharding import ParameterPlacement
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


_DORA = "DoraLinearVariant"
_UNTESTED = {  # keys of LoraConfig, and what a value there asks for
    "target_parameters": "adapters of parameters that are not a linear's weight (fused experts)",
    "layer_replication": "layers that share weights",
    "trainable_token_indices": "single rows of an embedding",
    "megatron_config": "Megatron's layers",
    "alora_invocation_tokens": "activated LoRA, which counts the local rows",
}
_INSTEAD = {  # of a key that is set by more than the user
    "trainable_token_indices": "leave it out, and TRL's chat_template_path, which sets it: call "
    "trl.clone_chat_template, and train modules_to_save=['embed_tokens', 'lm_head'], or all weights"
}


def check_adapter(model: PreTrainedModel, adapter: Adapter, world: World) -> None:
    """Raise ModelError, with every reason, for an adapter that is not shown to be exact under this home.

    The result is the same on every rank, before the first collective. Tensor parallelism has reasons of its own.
    """
    staged = world.home.pp > 1
    if staged and model_depths(model) and is_adapted(model.get_input_embeddings()):
        raise ModelError(
            f"{type(model).__name__} has multi-token prediction, for which the last pipeline stage has a copy of the "
            "embedding, and an adapter of the embedding, which would be trained twice; leave it out of "
            "target_modules, or use pp 1"
        )
    reasons = [*_adapter_configuration_reasons(adapter)]  # what peft then did to the model is a consequence
    reasons = reasons or [
        *_adapter_layer_reasons(model),
        *_missing_value_reasons(model),
        *_trained_parameter_reasons(model),
    ]
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    if staged and is_tied(model) and any(is_adapted(end) or has_trained_copy(end) for end in ends):
        reasons.append(
            "it changes an embedding that is tied to the head, of which the first and the last pipeline stage hold a "
            "copy each; leave embed_tokens and lm_head out, or use pp 1"
        )
    if reasons:
        raise ModelError(
            f"the adapter {adapter.name!r} of {type(model).__name__} cannot be trained: {'; '.join(reasons)}"
        )


def check_equal_adapters(model: PreTrainedModel, world: World) -> None:
    """Raise ModelError, on every rank, if ranks would begin with different adapters; all ranks call it together.

    Compared are checksums of all that is trained; parameters on the meta device have no values yet.
    """
    trained = dict(adapter_parameters(model)) | {n: p for n, p in model.named_parameters() if p.requires_grad}
    values: dict[str, Any] = {name: p.detach().cpu().contiguous() for name, p in trained.items() if not p.is_meta}
    digests = {name: zlib.crc32(x.view(torch.uint8).numpy()) for name, x in values.items()}
    digests_of_ranks = world.control.gather_objects(digests, "digests of adapters")
    for rank, rank_digests in zip(world.home.ranks, digests_of_ranks, strict=True):
        for name, digest in digests_of_ranks[0].items():
            if rank_digests.get(name) != digest:
                raise ModelError(
                    f"{name} is not the same on ranks {world.home.ranks[0]} and {rank}: peft draws with torch's "
                    "generator; call torch.manual_seed with one seed on every rank before peft.get_peft_model, or load "
                    "the adapter from a folder"
                )


def _adapter_configuration_reasons(adapter: Adapter) -> Iterator[str]:
    config = adapter.config
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        yield (
            f"it is of peft's method {kind}, and LoRA alone is supported; use peft.LoraConfig, or merge it first: "
            "model = peft_model.merge_and_unload()"
        )
        return
    for key, feature in _UNTESTED.items():
        if value := getattr(config, key, None):
            yield f"{key} is {reprlib.repr(value)}: {feature} are not supported; {_INSTEAD.get(key, 'leave it out')}"
    if getattr(config, "bias", "none") != "none":
        yield f"bias is {config.bias!r}, and biases of the base model stay frozen; use bias='none'"


def _adapter_layer_reasons(model: nn.Module) -> Iterator[str]:
    indexers = tuple(f"{name}." for name in find_indexers(model))
    for name, module in peft_modules(model).items():
        layer: Any = module
        if name.startswith(indexers):
            yield f"{name} belongs to an indexer, which gets no gradient; name target_modules without it"
            return
        if is_adapted(module):
            inner = type(layer.base_layer)
            variants = {type(v).__name__ for v in getattr(layer, "lora_variant", {}).values()} - {_DORA}
            if inner not in (nn.Linear, nn.Embedding) or not hasattr(layer, "lora_A"):
                kind = f"{type(module).__name__} over {inner.__name__}"
                yield f"{name} ({kind}) is no LoRA of an nn.Linear or nn.Embedding; leave it out of target_modules"
                return
            if variants:
                yield f"{name} uses {', '.join(sorted(variants))}; plain LoRA and DoRA are supported"
                return
            if layer.merged:
                yield f"{name} is merged into its weight; call peft_model.unmerge_adapter() first"
                return
        elif not hasattr(layer, "modules_to_save"):
            yield f"{name} ({type(module).__name__}) is no copy of modules_to_save; leave it out"
            return


def _missing_value_reasons(model: nn.Module) -> Iterator[str]:
    if "weights_to_come" in vars(model):
        from longspan.model.lora import adapter_is_drawn_by_prepare

        if not adapter_is_drawn_by_prepare(model):
            yield (
                "prepare reads its base model's weights (sharded=True), before which peft gives an adapter no "
                "values; load the base with sharded=False: load_model(folder, sharded=False)"
            )
    elif without_values := [name for name, p in adapter_parameters(model) if p.is_meta]:
        yield (
            f"{len(without_values)} of its parameters have no values ({without_values[0]}); load it without "
            "low_cpu_mem_usage=True, and its base with sharded=False"
        )


def _trained_parameter_reasons(model: nn.Module) -> Iterator[str]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        yield (
            "none of its parameters requires a gradient (inference_mode, or a frozen model); load it with "
            "is_trainable=True"
        )
    yield from depth_reasons(model)
    other_names = {name for name in trained if not belongs_to_adapter(name)}
    if base := sorted(other_names.difference(select_depth_weights(other_names))):
        yield f"{len(base)} parameters of the base model require gradients ({', '.join(base[:2])}); freeze them"
    if len(dtypes := {str(p.dtype).removeprefix("torch.") for p in trained.values()}) > 1:
        yield (
            f"what is trained is of {' and '.join(sorted(dtypes))}, of which FSDP2 sums the gradients in one type; "
            "cast it to one: for p in model.parameters(): if p.requires_grad: p.data = p.data.float()"
        )


def check_encoder_adapter(encoder: nn.Module, adapter: Adapter, tp: int) -> None:
    """Raise ModelError, with every reason, for an adapter that is not shown to be exact in an encoder under this tp."""
    if not (modules := peft_modules(encoder)):
        return
    reasons = [*_adapter_configuration_reasons(adapter), *_adapter_layer_reasons(encoder)]
    if copied := [name for name, module in modules.items() if has_trained_copy(module)]:
        reasons.append(
            f"modules_to_save has {', '.join(copied[:2])}; leave it out and call requires_grad_(True) of that module: "
            "it is saved as one of modules_to_save"
        )
    adapted = {name: base_module(module) for name, module in modules.items() if is_adapted(module)}
    if trained := [name for name, linear in adapted.items() if any(p.requires_grad for p in linear.parameters())]:
        reasons.append(f"{', '.join(trained[:2])} have adapters, and weights that are trained too; train one of them")
    for key in ("use_dora", "lora_bias"):
        if tp > 1 and getattr(adapter.config, key, False):
            reasons.append(f"{key} is set, which is not shown to be exact under the encoder's tp {tp}; use tp 1")
    if tp > 1 and adapter.dropout:
        reasons.append(
            f"lora_dropout is {adapter.dropout:g}, and the encoder's {tp} tensor-parallel ranks would drop different "
            "inputs; use tp 1"
        )
    if reasons:
        raise ModelError(
            f"the adapter {adapter.name!r} of a tower or projector cannot be trained: {'; '.join(reasons)}"
        )


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
        shard_indexers(model, alone=True)
    for mixer in find_mixers(model).values():
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
        experts: Any = module
        x = torch.randn(_ROWS, model.config.get_text_config().hidden_size, dtype=torch.float64)
        chosen = torch.rand(_ROWS, int(experts.num_experts)).topk(min(2, int(experts.num_experts))).indices
        weights = torch.rand(chosen.shape, dtype=torch.float64)
        error = relative_error(mix_experts(experts, x, chosen, weights), experts(x, chosen, weights))
        if error > _TOLERANCE:
            yield f"{name} ({type(experts).__name__}) computes something of its own: ours differs by {error:.1e}"
            return


def check_model(
    model: nn.Module,
    placement: ParameterPlacement,
    connect: Callable[[PreTrainedModel], None],
    *,
    stages: int,
    kernel: str | None,
) -> tuple[Adapter | None, tuple[AttendCall, ...], MetaRecord]:
    """Raise ModelError, naming layers and settings, for a model that cannot run exactly over a sharded sequence.

    `connect` makes the model's attention, mixers and experts call longspan. In order: what it declares, a small copy of
    its class, its adapter and placement (also `tensor_parallel/split_trial.py`), and a pass of the connected model on
    the meta device. Later `row_trial.py` tries the placed model, and depths, images, encoders,
    stages and the loss by rows are tried where they are made. Returns the adapter, the calls of attention, each once,
    and what the pass recorded.
    """
    if is_prepared(model):
        raise ModelError(f"this {type(model).__name__} was prepared already; prepare a model once")
    with unwrap_trained_depths_or_undo(model), _score_rows_or_undo(model):
        adapter, class_draws = check_unconnected(model, placement, stages=stages)
        assert isinstance(model, PreTrainedModel)  # others were refused
        if adapter is not None:  # last, as it compares ranks, each of which has passed its own checks
            check_equal_adapters(model, placement.world)
    connect(model)
    record = record_calls_and_draws(model, class_draws)
    device, dtype = placement.world.device, placement.dtype_of(model)
    calls = check_kernel_for_calls(model, kernel, record.calls, device=device, dtype=dtype)
    return adapter, calls, record


def check_unconnected(
    model: nn.Module, placement: ParameterPlacement, *, stages: int
) -> tuple[Adapter | None, tuple[str, ...]]:
    """Raise ModelError as `check_model` for what a rank tells alone; returns the adapter, and draws of the class."""
    refuse_unsupported_model(model)
    assert isinstance(model, PreTrainedModel)  # others were refused
    class_draws = refuse_inexact_class(model) if needs_class_trial(model) else ()
    adapter = find_adapter(model)
    if adapter is not None:
        check_adapter(model, adapter, placement.world)
    placement.check_placement(model, stages)
    return adapter, class_draws


def _score_rows_or_undo(model: nn.Module) -> AbstractContextManager[None]:
    scores = any(kind.__name__.endswith(SCORE_HEADS) for kind in type(model).__mro__)
    if not (scores and isinstance(model, PreTrainedModel)):
        return nullcontext()
    from longspan.model.score_heads import score_rows_or_undo

    return score_rows_or_undo(model)


def needs_class_trial(model: PreTrainedModel) -> bool:
    """Whether a small copy of the class is tried: of one with experts, or that is not transformers' own."""
    return has_experts(model) or not type(innermost_decoder(model)).__module__.startswith("transformers.")

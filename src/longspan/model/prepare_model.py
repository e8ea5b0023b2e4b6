"""`prepare`: bring a Hugging Face model under a home, and the encoder of a vision-language model under one of its own.

How a language model is prepared is in `prepared.py`, how images reach it in `vision/`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, overload

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.adapters import (
    Adapter,
    base_module,
    find_adapter,
    is_adapted,
    is_copied,
    peft_modules,
    unwrap_model,
)
from longspan.model.exactness.adapter_rules import configuration_reasons, layer_reasons
from longspan.model.exactness.row_trial import try_rows_at_first_call
from longspan.model.lora.without_adapter import redirect_peft_model
from longspan.model.multimodal.checks import check_encoder_home
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import PrepareOptions, prepare_language_model
from longspan.model.take_apart import take_apart_or_undo
from longspan.model.vision.join import IMAGE, EncoderHome, join_parts
from longspan.model.weights.fill import find_deferred_weights


@overload
def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: None = None,
    options: PrepareOptions | None = None,
    **changes: Any,
) -> PreTrainedModel | PipelineModel: ...


@overload
def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: Layout | World | EncoderHome,
    options: PrepareOptions | None = None,
    **changes: Any,
) -> MultimodalModel: ...


@overload
def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: Layout | World | EncoderHome | None,
    options: PrepareOptions | None = None,
    **changes: Any,
) -> PreTrainedModel | PipelineModel | MultimodalModel: ...


def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: Layout | World | EncoderHome | None = None,
    options: PrepareOptions | None = None,
    **changes: Any,
) -> PreTrainedModel | PipelineModel | MultimodalModel:
    """Bring a Hugging Face causal language model under the world's home; returns the same model.

    >>> model = prepare(Qwen3ForCausalLM(config), world)
    >>> shard = bind(plan.micro_batches[0], world).with_padding()
    >>> logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits  # (1, T, V)

    Options are keywords, those of `PrepareOptions`, which `options=` takes as one value; keywords win.

    All ranks call it together, with equal weights. `shard_parameters` shards them over the slots with FSDP2, otherwise
    every rank keeps a copy; `reshard_after_forward` frees a layer's gathered parameters between forward and backward;
    `activation_checkpointing` recomputes each decoder layer in backward: "full" (or True) all of it, "selective" all
    but attention, whose output is kept; `recompute_layers` is how many of a stage's layers, the first ones, do so (0:
    all); `offload_activations` keeps in the host's memory what recomputation starts from. `measures` replaces these
    three: a word of `longspan.plan.MEASURES` for each decoder layer of the whole model and then for each depth of
    multi-token prediction, measures=("none", "selective+host", …), or one word for all.
    `host_bytes` is how much of the host's memory a rank uses for this: `prepare` checks that it is there and allocates
    it (0: the first step measures how much it needs).
    `mlp_tile_rows` is the most rows that MLPs and experts compute at once, forward and backward (0: all rows), so that
    only the intermediate values of one tile are in memory; each parameter still gets one gradient, summed in float32.
    `segment_layers` n: of n neighbouring layers that recompute, only the input of the first is kept (0: that of each).
    The others' inputs, and attention's outputs by their measure, are computed again when backward reaches the segment.
    `compute_dtype` (such as bfloat16) is what FSDP2 computes in, over parameters and gradient sums in their own type.
    `attention_kernel` names a row of `longspan.attention.KERNELS`; without it each call takes the first that can.
    `mixer_kernels` names kernels of state-space layers that are used only on request: "mamba_ssm", "causal_conv1d", or
    only "torch" (docs/hybrid.md).
    `fused_norms` runs RMS norms as one kernel (`norms.py`): "on", "off", or "auto": on GPUs, those that can.
    `float8="rows"` multiplies in float8 in the linears and experts of decoder layers, with one scale a row; gradients
    of weights, head, norms, routers and adapters stay in bfloat16 (docs/precision.md).
    `compiled` is "layers" (each decoder layer as two halves around attention, by torch.compile), "modules" or True (its
    norms and MLPs), "auto" (layers on GPUs without tensor parallelism, of models whose hidden states have
    2048 features or more), or "none".
    `probe=False` skips the trial forward pass on the meta device that shows whether every layer reaches `attend`; the
    model's first pass then shows it, and raises ModelError.

    Where `home.pp` is above 1, this rank's stages are cut out, `virtual_stages` of them, and returned as a
    PipelineModel; the rest of the model is freed. `pipeline_schedule` is "1f1b" (interleaved with several virtual
    stages), "gpipe", "zero_bubble" or "zbv" (two virtual stages, folded). Parameters then stay gathered from the first
    forward to the last backward pass of a step, whatever `reshard_after_forward` is.

    Where `home.tp` is above 1, heads, widths and vocabulary are split over the tensor-parallel ranks of a slot by the
    model's plan; with `sequence_parallel`, norms and residuals hold rows / tp of a slot's rows, which must be a
    multiple of tp: plan with `row_multiple=home.tp`.

    With `encoder`, a model from images and text to text becomes a MultimodalModel: its tower and projector run under
    that home, and the rest under the world's. `encoder` is a Layout over the same ranks, for which a World is opened
    that closes with `world`, or a World that is open. Settings of the encoder are those of the language model, or those
    of an `EncoderHome`.

    A PeftModel with a LoRA adapter: the transformers model inside it is prepared and returned; only its adapter is
    trained and saved, and `longspan.without_adapter(model)` leaves it out for a while.

    A model that draws at random outside attention in training, as by `resid_pdrop`, is evaluated as it is; training it
    is refused. Whether rows influence each other outside attention, as by a patch or a hook, is tried by a few passes
    before the first step or call (docs/limits.md).

    Raises ModelError, naming layers and settings, for a model that cannot run exactly over a sharded sequence.
    """
    options = replace(options or PrepareOptions(), **changes)
    if encoder is None:
        prepared = prepare_language_model(model, world, options)
        try_rows_at_first_call(prepared)
        return prepared
    home = EncoderHome.of(encoder, shard_parameters=options.shard_parameters, compute_dtype=options.compute_dtype)
    stock = unwrap_model(model)
    weights, adapter = find_deferred_weights(stock), find_adapter(stock)
    check_encoder_home(IMAGE, home.layout, world)
    with take_apart_or_undo(stock) as parts:
        if adapter is not None:
            _check_encoder_adapter(parts.encoder, adapter, home.layout.tp)
        language_model: Any = prepare_language_model(model, world, options)
        try_rows_at_first_call(language_model)
        language_model.adapter = adapter  # also if only the encoder has one
        prepared = join_parts(parts, language_model, world, home, weights)
    redirect_peft_model(model, prepared)
    return prepared


def _check_encoder_adapter(encoder: nn.Module, adapter: Adapter, tp: int) -> None:
    """Raise ModelError, with every reason, for an adapter that is not shown to be exact in an encoder under this tp.

    Ranks need not agree on the error: `prepare_encoder` checks that the adapter is the same on all.
    """
    if not peft_modules(encoder):
        return
    if reasons := [
        *configuration_reasons(adapter),
        *layer_reasons(encoder),
        *_encoder_reasons(encoder, adapter, tp),
    ]:
        raise ModelError(
            f"the adapter {adapter.name!r} of a tower or projector cannot be trained: {'; '.join(reasons)}"
        )


def _encoder_reasons(encoder: nn.Module, adapter: Adapter, tp: int) -> Iterator[str]:
    """Yield why an adapter in an encoder cannot be trained or saved, or would not be exact under this tp."""
    modules = peft_modules(encoder)
    if copied := [name for name, module in modules.items() if is_copied(module)]:
        yield (
            f"modules_to_save has {', '.join(copied[:2])}; leave it out and call requires_grad_(True) of that module: "
            "it is saved as one of modules_to_save"
        )
    adapted = {name: base_module(module) for name, module in modules.items() if is_adapted(module)}
    if trained := [name for name, linear in adapted.items() if any(p.requires_grad for p in linear.parameters())]:
        yield f"{', '.join(trained[:2])} have adapters, and weights that are trained too; train one of them"
    for key in ("use_dora", "lora_bias"):
        if tp > 1 and getattr(adapter.config, key, False):
            yield f"{key} is set, which is not shown to be exact under the encoder's tp {tp}; use tp 1"
    if tp > 1 and adapter.dropout:
        yield (
            f"lora_dropout is {adapter.dropout:g}, and the encoder's {tp} tensor-parallel ranks would drop different "
            "inputs; use tp 1"
        )

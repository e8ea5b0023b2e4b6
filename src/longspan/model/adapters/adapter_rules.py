"""Rules for adapters of peft: which ones are shown to be exact in a model, or in an encoder, under a home.

`AdapterFeature` has `prepare` check them, and note the adapter at the model.
"""

import reprlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.adapted_modules import (
    belongs_to_adapter,
    has_trained_copy,
    is_adapted,
    is_expert_adapter,
    peft_modules,
    unadapted_module,
)
from longspan.model.adapters.adapter import Adapter, adapter_parameters, find_adapter
from longspan.model.adapters.disable_adapter import redirect_peft_model
from longspan.model.adapters.new_adapter import DrawnAdapter
from longspan.model.feature import Call, Feature
from longspan.model.kinds import expert_modules, find_choosing_modules, is_linear, reads_weight_alone
from longspan.model.layers import is_tied, mtp_depths
from longspan.model.mtp.depths import reasons_against_mtp, select_mtp_weights
from longspan.model.weights.fill import find_deferred_weights

_DORA = "DoraLinearVariant"


_MATRICES_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")

_UNTESTED = {  # keys of LoraConfig, and what a value there asks for
    "layer_replication": "layers that share weights",
    "trainable_token_indices": "single rows of an embedding",
    "megatron_config": "Megatron's layers",
    "alora_invocation_tokens": "activated LoRA, which counts the local rows",
}


# Another library may have set these keys; each value says what to do about it.
_INSTEAD = {
    "trainable_token_indices": "leave it out, and TRL's chat_template_path, which sets it: call "
    "trl.clone_chat_template, and train modules_to_save=['embed_tokens', 'lm_head'], or all weights"
}


def check_adapter(model: PreTrainedModel, adapter: Adapter, world: World) -> None:
    """Raise ModelError, with every reason, for an adapter that is not shown to be exact under this home.

    Every rank comes to the same result, without a collective. Tensor parallelism has reasons of its own elsewhere.
    """
    staged = world.home.pp > 1
    if staged and mtp_depths(model) and is_adapted(model.get_input_embeddings()):
        raise ModelError(
            f"{type(model).__name__} has multi-token prediction, for which the last pipeline stage has a copy of the "
            "embedding, and an adapter of the embedding, which would be trained twice; leave it out of "
            "target_modules, or use pp 1"
        )
    reasons = [*_adapter_configuration_reasons(adapter)]
    # What peft made of the model by a refused configuration is no reason of its own.
    if not reasons:
        reasons = [*_adapter_layer_reasons(model), *_parameter_reasons(model)]
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
    """At most one reason: that of the first such module in the order of the model."""
    experts = expert_modules(model).values()
    indexers = tuple(f"{name}." for name in find_choosing_modules(model))
    for name, module in peft_modules(model).items():
        layer: Any = module
        if name.startswith(indexers):
            yield f"{name} belongs to an indexer, which gets no gradient; name target_modules without it"
            return
        owner_name, _, attribute = name.rpartition(".")
        if reads_weight_alone(owner := model.get_submodule(owner_name), attribute):
            yield (
                f"{name} has an adapter that nothing computes with, as the forward of {type(owner).__name__} reads its "
                "weight and does not call it; name target_modules without it"
            )
            return
        if is_expert_adapter(module):
            if layer.get_base_layer() not in experts or layer.parameter_name not in _MATRICES_OF_EXPERTS:
                yield f"{name} adapts {layer.parameter_name}, which is no matrix of experts; leave it out"
                return
        elif is_adapted(module):
            inner = layer.base_layer
            variants = {type(v).__name__ for v in getattr(layer, "lora_variant", {}).values()} - {_DORA}
            if not (is_linear(inner) or type(inner) is nn.Embedding) or not hasattr(layer, "lora_A"):
                kind = f"{type(module).__name__} over {type(inner).__name__}"
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


def _parameter_reasons(model: nn.Module) -> Iterator[str]:
    if (weights := find_deferred_weights(model)) is not None:
        if not isinstance(getattr(weights.source, "added", None), DrawnAdapter):
            yield (
                "prepare reads its base model's weights (sharded=True), before which peft gives an adapter no "
                "values; load the base with sharded=False: load_model(folder, sharded=False), dequantised where it is "
                'in 4 or 8 bits (quantized=True, and frozen="nf4" in prepare)'
            )
    elif without_values := [name for name, p in adapter_parameters(model) if p.is_meta]:
        yield (
            f"{len(without_values)} of its parameters have no values ({without_values[0]}); load it without "
            "low_cpu_mem_usage=True, and its base with sharded=False"
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        yield (
            "none of its parameters requires a gradient (inference_mode, or a frozen model); load it with "
            "is_trainable=True"
        )
    yield from reasons_against_mtp(model)
    other_names = {name for name in trained if not belongs_to_adapter(name)}
    if base := sorted(other_names.difference(select_mtp_weights(other_names))):
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
    adapted = {name: unadapted_module(module) for name, module in modules.items() if is_adapted(module)}
    if trained := [name for name, linear in adapted.items() if any(p.requires_grad for p in linear.parameters())]:
        reasons.append(
            f"{', '.join(trained[:2])} have adapters, and weights that are trained too; train one of them"
        )
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


class AdapterFeature(Feature):
    """An adapter, which alone is trained and saved."""

    _adapter: Adapter

    def __init__(self, call: Call) -> None:
        """Keep what was given to `prepare`, perhaps a PeftModel, which `finish` redirects."""
        super().__init__(call)
        self._peft_model = call.given

    def refuse(self, model: PreTrainedModel) -> None:
        """Find the adapter, which `finish` hands to the prepared model, and check it."""
        adapter = find_adapter(model)
        assert adapter is not None  # the model has modules of peft
        check_adapter(model, adapter, self.world)
        self._adapter = adapter

    def check_same_on_all_ranks(self, model: PreTrainedModel) -> None:
        """Raise ModelError, on every rank, if ranks would begin with different adapters; all ranks call it together.

        Compared are checksums of all that is trained; parameters on the meta device have no values yet.
        """
        trained = dict(adapter_parameters(model)) | {n: p for n, p in model.named_parameters() if p.requires_grad}
        values: dict[str, Any] = {
            name: p.detach().cpu().contiguous() for name, p in trained.items() if not p.is_meta
        }
        digests = {name: zlib.crc32(x.view(torch.uint8).numpy()) for name, x in values.items()}
        digests_of_ranks = self.world.control.gather_objects(digests, "digests of adapters")
        ranks = self.world.home.ranks
        for rank, rank_digests in zip(ranks, digests_of_ranks, strict=True):
            for name, digest in digests_of_ranks[0].items():
                if rank_digests.get(name) != digest:
                    raise ModelError(
                        f"{name} is not the same on ranks {ranks[0]} and {rank}: peft draws with torch's generator; "
                        "call torch.manual_seed with one seed on every rank before peft.get_peft_model, or load the "
                        "adapter from a folder"
                    )

    def finish(self, prepared: Any, models: Sequence[PreTrainedModel]) -> None:
        """Note the adapter at the prepared model, and redirect the PeftModel that was given to `prepare`."""
        prepared.adapter = self._adapter
        redirect_peft_model(self._peft_model, prepared)

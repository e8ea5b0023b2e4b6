"""Arguments with which a prepared model and its layers are called, checked on the host before any collective."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.layers import (
    architecture_name,
    reads_other_modalities,
)
from longspan.model.seams.call_rules import call_rules, refuse_documents_beyond_positions
from longspan.model.seams.randomness import refuse_randomness
from longspan.model.seams.trial_shards import Probe


def require_shard(name: str, shard: object, call: str = "model(..., shard=shard)") -> SequenceShard:
    """Return the shard that a model or layer of this name was called with; ModelError for something else."""
    if isinstance(shard, SequenceShard):
        return shard
    got = "no shard" if shard is None else f"shard={type(shard).__name__}"
    raise ModelError(
        f"{name} got {got}; call {call} with shard = bind(micro_batch, world); a Trainer, of TRL too, cannot make one: "
        "give the model before prepare to longspan.hf.with_longspan(Trainer)"
    )


def require_one_row_shard(name: str, shard: object, batch: int, rows: int) -> SequenceShard:
    """Return the shard that a layer of this name was called with, if it is one packed row of all the layer's rows.

    Raises ModelError if it is not.
    """
    shard = require_shard(name, shard)
    if batch != 1 or rows != shard.local_rows:
        raise ModelError(f"{name} got {batch} x {rows} rows; the shard is one packed row of {shard.local_rows}")
    return shard


# These arguments say where packed rows begin.
_BOUNDS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_REFUSED = {  # arguments that a prepared model does not take, with what to give in their place
    "labels": "labels would be shifted across rows that are not neighbours; use longspan.run_step",
    "attention_mask": "the shard says which rows see which; leave attention_mask out",
    "past_key_values": "there is no key/value cache in training; leave past_key_values out",
    "cache_params": "there is no cache of states in training; leave cache_params out",
    "output_attentions": "attention weights are never formed; leave output_attentions out",
    "use_cache": "there is no key/value cache in training; use_cache must be False",
    **{name: f"the shard says where documents begin; leave {name} out" for name in _BOUNDS},
}
PARTS_OF_POSITIONS = (3, 4)  # M-RoPE: time, height and width; of four, the position in the text comes first


def complete_model_call(model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
    """Refuse what would not be exact, on the host, before any collective; return the call as the model takes it.

    A forward pre-hook of a prepared model: positional ids become a keyword, None arguments go, inputs get a batch dim,
    the model's kernel and `use_cache=False` are added. Raises ModelError. Calls with a `Probe` are not checked.
    """
    architecture = architecture_name(model)
    call_text = f"{architecture}(input_ids=ids, position_ids=shard.position_ids[None], shard=shard)"
    if len(args) > 1:
        raise ModelError(f"call {call_text} with keyword arguments; got {len(args)} positional ones")
    inputs = {**({"input_ids": args[0]} if args else {}), **{k: v for k, v in kwargs.items() if v is not None}}
    if isinstance(inputs.get("shard"), Probe):
        return (), inputs
    shard = require_shard(architecture, inputs.get("shard"), call_text)
    for name, reason in _REFUSED.items():
        if inputs.get(name) is not None and inputs[name] is not False:
            raise ModelError(f"{architecture} got {name}=: {reason}")
    if "position_ids" not in inputs:
        raise ModelError(
            f"{architecture} got no position_ids; the local rows are not consecutive: call {call_text}"
        )
    if isinstance(model, PreTrainedModel) and reads_other_modalities(model):
        # Values such as flags carry no input. `future_ids` are tokens for depths of multi-token prediction.
        text_inputs = {"input_ids", "inputs_embeds", "position_ids", "shard", "future_ids"}
        if others := [k for k, x in inputs.items() if k not in text_inputs and isinstance(x, Tensor | list | dict)]:
            raise ModelError(
                f"{architecture} got {', '.join(f'{name}=' for name in others)}: through it text alone is "
                "exact; for images and the like give its encoder and its language model homes of their own "
                "(longspan.MultimodalModel, docs/bridge.md)"
            )
    refuse_randomness(model, training=model.training)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if name in inputs:
            inputs[name] = _make_one_row(name, inputs[name], shard)
    rules = call_rules(model)
    rules.check_shard(shard)
    if any(group.parents is not None for group in shard.micro_batch.groups):
        rules.check_shared_prefixes((shard.micro_batch,), training=model.training)
    if rules.position_table is not None:
        refuse_documents_beyond_positions(rules.position_table, (shard.micro_batch,), shard.padding_rows)
    return (), rules.add_kernel_argument(inputs) | {"use_cache": False}


def _make_one_row(name: str, x: Tensor, shard: SequenceShard) -> Tensor:
    """The result is (1, T, …). Positions in parts (M-RoPE) are (parts, 1, T), and stay so."""
    if name == "position_ids" and x.ndim == 3 and x.shape[0] in PARTS_OF_POSITIONS and x.shape[1] == 1:
        _make_one_row(name, x[0], shard)  # checks the rows of a part
        return x
    plain_dims = 2 if name == "inputs_embeds" else 1
    x = x.unsqueeze(0) if x.ndim == plain_dims else x
    if x.ndim != plain_dims + 1 or x.shape[0] != 1:
        raise ModelError(
            f"{name} has shape {tuple(x.shape)}; a shard is one packed row: use (1, {shard.local_rows})"
        )
    if x.shape[1] != shard.local_rows:
        raise ModelError(f"{name} has {x.shape[1]} rows, the shard holds {shard.local_rows}; use shard.scatter(x)")
    if shard.local_rows == 0:
        raise ModelError("the shard holds no rows and transformers models need one; use shard.with_padding()")
    return x

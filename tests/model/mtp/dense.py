"""Multi-token prediction written plainly: one process, the stock model and its depths on each document by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.model.add_depths import add_mtp
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.mtp import MtpBlocks
from longspan.model.presets import preset_config
from longspan.model.seams.mixers import find_mixers
from tests.model.deep import deep
from tests.model.seams.families import tiny as of_family
from tests.model.stock import at_random, gradients_of, tiny

LENGTHS = (13, 1, 30, 7, 2, 18, 3, 9)
WEIGHT = 0.7


# Two layers, of which the last is attention or a scan: preset, and what says which.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3-next-tiny", {"layer_types": ["linear_attention", "full_attention"]}),
    "qwen3-next, a scan last": ("qwen3-next-tiny", {"layer_types": ["full_attention", "linear_attention"]}),
    "bamba, a scan last": ("bamba-tiny", {"attn_layer_indices": [0]}),
    "nemotron-h": ("", {"n_routed_experts": 4}),  # of whose depths each has a layer of attention and one of experts
    "zamba2": ("", {"use_shared_attention_adapter": True, "use_mem_rope": True}),  # its last layer attends too
}
# Inputs of each layer made of ids; keys of earlier layers in its last two; experts beside the dense network.
GEMMA4: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4", {"num_kv_shared_layers": 0}),
    "gemma4, keys shared": ("gemma4", {"use_double_wide_mlp": True}),
    "gemma4, experts": (
        "gemma4 without sharing",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
}
AS_CALLED = ("zamba2", *GEMMA4)  # whose layers get what is made of the rows' tokens: `as_called.py` says how


def _hybrid(family: str) -> PreTrainedModel:
    preset, types = HYBRIDS[family]
    if not preset:
        config: Any = shrink_configuration(CONFIG_MAPPING[family.replace("-", "_")](**types))
        config.update({"vocab_size": 64})
        config._experts_implementation = "eager"
        return at_random(config)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = {"mamba_n_heads": 4, "mamba_d_head": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    config: Any = preset_config(preset, vocab_size=64)
    config.update(sizes | {key: value for key, value in small.items() if hasattr(config, key)} | types)
    config._experts_implementation = "eager"
    return at_random(config)


def with_depths(family: str, depths: int, layers: int = 2) -> PreTrainedModel:
    """A tiny model in float64 with depths, none of whose weights stands at one or at nothing."""
    if family in HYBRIDS:
        model = _hybrid(family)
    elif family in GEMMA4:
        name, changes = GEMMA4[family]
        model = of_family(name, vocab_size=64, vocab_size_per_layer_input=64, **changes)
        model.config._experts_implementation = "eager"
    elif layers == 2:
        model = tiny(family, torch.float64, attention="eager", vocabulary=64)
    else:
        model = deep(family, torch.float64, layers, vocabulary=64)
    add_mtp(model, depths)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.startswith("mtp."):
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@dataclass(frozen=True)
class Answer:
    """The main loss, the loss of each depth, and the gradient of their weighted sum."""

    loss: float
    mtp_losses: tuple[float, ...]
    gradients: dict[str, Tensor]


def dense(model: Any, documents: Sequence[np.ndarray], masks: Sequence[np.ndarray], weights: Sequence[float]) -> Answer:
    """Depth by depth each document gets shorter: its rows without a later token are left out.

    `masks[i]` says which tokens of document i are targets, `weights[i]` what their losses count.
    """
    depths = list(model.mtp.layers)
    sums: list[Any] = [0.0] * (1 + len(depths))
    counts = [0] * (1 + len(depths))
    for document, mask, weight in zip(documents, masks, weights, strict=True):
        ids, targets = torch.from_numpy(document), torch.from_numpy(mask)
        hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state
        for depth in range(1 + len(depths)):
            if depth:
                hidden = _next(model, depths[depth - 1], hidden[:, :-1], ids[depth:])
            if len(ids) > depth:
                labels, known = ids[depth + 1 :], targets[depth + 1 :]
                losses = F.cross_entropy(_logits(model, hidden)[0, :-1], labels, reduction="none")
                sums[depth] = sums[depth] + weight * losses[known].sum()
                counts[depth] += int(known.sum())
            else:
                break
    means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
    (means[0] + WEIGHT / len(depths) * sum(means[1:])).backward()
    loss, *deeper = (float(torch.as_tensor(mean).detach()) for mean in means)
    return Answer(loss, tuple(deeper), gradients_of(model))


def _next(model: Any, depth: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """One depth on the rows that have a later token; positions are those of the tokens, as in transformers."""
    if not len(ids):
        return hidden
    later = model.get_input_embeddings()(ids[None])
    x = depth.eh_proj(torch.cat([depth.enorm(later), depth.hnorm(hidden)], -1))
    positions = torch.arange(len(ids))[None] + 1
    layer, config = depth.mtp_block, model.config
    types = getattr(config, "layer_types", None)
    full = types is not None and types[-1] == "full_attention"
    window = None if full else getattr(config, "sliding_window", None)
    age = positions[0, :, None] - positions[0, None, :]
    hidden_rows = (age < 0) | (age >= (window or len(ids)))
    mask = torch.zeros(age.shape, dtype=x.dtype).masked_fill(hidden_rows, torch.finfo(x.dtype).min)
    rotary = model.model.rotary_emb(x, positions) if hasattr(model.model, "rotary_emb") else None
    for block in layer if isinstance(layer, MtpBlocks) else [layer]:
        causal = None if find_mixers(block) else mask[None, None]
        out = block(x, attention_mask=causal, position_embeddings=rotary, position_ids=positions)
        x = out if isinstance(out, Tensor) else out[0]
    return depth.post_norm(x)


def _logits(model: Any, hidden: Tensor) -> Tensor:
    logits, cap = model.lm_head(hidden), getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)

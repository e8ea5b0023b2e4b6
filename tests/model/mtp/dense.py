"""Multi-token prediction of any family, written plainly: one process, depths called as the stock model calls its layer.

A document keeps all its rows at every depth: those at its end read tokens of its beginning, and, since every row sees
earlier ones alone, nothing that has a target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import peft
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.model.add_depths import add_mtp
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.layers import base_model, decoder_layers, decoder_model, layer_lists
from longspan.model.mtp.depths import MtpBlocks
from longspan.model.presets import preset_config
from tests.model.deep import deep
from tests.model.lora.adapted import drawn
from tests.model.stock import at_random, gradients_of, tiny, worst

LENGTHS = (13, 1, 30, 7, 2, 18, 3, 9)
WEIGHT = 0.7
Call = tuple[tuple[Any, ...], dict[str, Any]]

# Two layers, of which the last is attention or a scan: preset, and what says which.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3-next-tiny", {"layer_types": ["linear_attention", "full_attention"]}),
    "qwen3-next, a scan last": ("qwen3-next-tiny", {"layer_types": ["full_attention", "linear_attention"]}),
    "bamba, a scan last": ("bamba-tiny", {"attn_layer_indices": [0]}),
    "nemotron-h": ("", {"n_routed_experts": 4}),  # of whose depths each has a layer of attention and one of experts
}


def _hybrid(family: str) -> PreTrainedModel:
    preset, changes = HYBRIDS[family]
    if preset:
        config: Any = preset_config(preset, vocab_size=64)
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        small = {"mamba_n_heads": 4, "mamba_d_head": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
        config.update(sizes | {key: value for key, value in small.items() if hasattr(config, key)} | changes)
    else:
        config = shrink_configuration(CONFIG_MAPPING[family.replace("-", "_")](**changes))
        config.update({"vocab_size": 64})
    config._experts_implementation = "eager"
    return at_random(config)


def with_depths(family: str, depths: int, layers: int = 2) -> PreTrainedModel:
    if family in HYBRIDS:
        model = _hybrid(family)
    elif layers == 2:
        model = tiny(family, torch.float64, attention="eager", vocabulary=64)
    else:
        model = deep(family, torch.float64, layers, vocabulary=64)
    return add_drawn_depths(model, depths)


LINEARS = ["eh_proj", "q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "down_proj"]


def adapted(model: Any, **more: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, **more}
    return drawn(peft.get_peft_model(model, peft.LoraConfig(**settings)))


def add_drawn_depths(model: Any, depths: int) -> Any:
    add_mtp(model, depths)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.mtp.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@dataclass(frozen=True)
class Answer:
    """The main loss, the loss of each depth, and the gradient of their weighted sum."""

    loss: float
    mtp_losses: tuple[float, ...]
    gradients: dict[str, Tensor]

    def error(self, result: Any, gradients: dict[str, Tensor], *, in_part: bool = False) -> float:
        """The largest relative error of a step's losses and gradients, of which `in_part` not all are here."""
        pairs = zip((result.loss, *result.mtp_losses), (self.loss, *self.mtp_losses), strict=True)
        here = {name: self.gradients[name] for name in gradients} if in_part else self.gradients
        return max(*(abs(loss / max(there, 1e-30) - 1) for loss, there in pairs), worst(gradients, here))


def dense(
    model: Any,
    documents: Sequence[np.ndarray],
    masks: Sequence[np.ndarray] | None = None,
    weights: Sequence[float] | None = None,
    images: Sequence[dict[str, Tensor]] | None = None,
) -> Answer:
    """`masks[i]` says which tokens of document i are targets (none: all), `weights[i]` what their losses count.

    `images[i]` are inputs of the model beside its ids.
    """
    if isinstance(model, peft.PeftModel):  # whose copy of depths that are trained whole has the name of depths
        model = cast(Any, model.get_base_model())
        model.mtp = getattr(model.mtp, "modules_to_save", {"default": model.mtp})["default"]
    depths = [*model.mtp.layers]
    sums: list[Any] = [0.0] * (1 + len(depths))
    counts = [0] * (1 + len(depths))
    for i, document in enumerate(documents):
        ids, mask = torch.from_numpy(document), torch.from_numpy(masks[i]) if masks else torch.ones(len(document)) > 0
        for ahead, logits in enumerate(_logits_of_depths(model, ids, images[i] if images else {})):
            losses = F.cross_entropy(logits[: len(ids) - 1 - ahead], ids[1 + ahead :], reduction="none")
            sums[ahead] = sums[ahead] + (weights[i] if weights else 1.0) * losses[mask[1 + ahead :]].sum()
            counts[ahead] += int(mask[1 + ahead :].sum())
    means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
    (means[0] + WEIGHT / len(depths) * sum(means[1:])).backward()
    loss, *deeper = (float(torch.as_tensor(mean).detach()) for mean in means)
    return Answer(loss, tuple(deeper), gradients_of(model))


def _logits_of_depths(model: Any, ids: Tensor, images: dict[str, Tensor]) -> list[Tensor]:
    """(T, V) of the model, then of each depth that has a target."""
    inputs = {"input_ids": ids[None], "use_cache": False, **images}
    hidden, embedded, (args, kwargs) = _base(model, inputs)
    logits = [_head(model, inputs, hidden)]
    for ahead, depth in enumerate(model.mtp.layers, 1):
        if len(ids) > 1 + ahead:
            x = depth.eh_proj(torch.cat([depth.enorm(embedded.roll(-ahead, 1)), depth.hnorm(hidden)], -1))
            for block in depth.mtp_block if isinstance(depth.mtp_block, MtpBlocks) else [depth.mtp_block]:
                out = block(x, *args, **kwargs)
                x = out if isinstance(out, Tensor) else out[0]
            hidden = depth.post_norm(x)
            logits.append(_head(model, inputs, hidden))
    return logits


def _base(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Call]:
    """Last hidden states, embeddings with rows of images, and what the layer is called with that depths copy."""
    calls: list[Call] = []
    layer = [*decoder_layers(model).values()][-1]
    note = lambda _, args, kwargs: calls.append((args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}))  # noqa: E731
    embedded = [model.get_input_embeddings()(inputs["input_ids"])]
    handles = [layer.register_forward_pre_hook(note, with_kwargs=True)]
    if len(inputs) > 2:
        text, with_images = decoder_model(model), lambda _, __, kwargs: embedded.append(kwargs["inputs_embeds"])
        handles.append(text.register_forward_pre_hook(with_images, with_kwargs=True))
    hidden = base_model(model)(**inputs)[0]
    for handle in handles:
        handle.remove()
    return hidden, embedded[-1], calls[0]


def _head(model: Any, inputs: dict[str, Any], hidden: Tensor) -> Tensor:
    """Logits (T, V) of the model's own forward, where what is around its layers answers with these hidden states."""

    def answer(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return hidden
        output["last_hidden_state"] = hidden
        return output

    around = model.get_submodule([*layer_lists(model)][-1].rpartition(".")[0])
    handle = around.register_forward_hook(answer)
    logits = model(**inputs).logits[0]
    handle.remove()
    return logits

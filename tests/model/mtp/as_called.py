"""Multi-token prediction of any family, written plainly: one process, depths called as the stock model calls its layer.

A document keeps all its rows at every depth: those at its end read tokens of its beginning, and, since every row sees
earlier ones alone, nothing that has a target. What Zamba 2 and Gemma 4 give a layer of the rows' own tokens is made of
the later ones here by formulas of these families.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from longspan.model.layers import base_model, decoder_layers, decoder_model, layer_list
from longspan.model.mtp import MtpBlocks
from tests.model.mtp.dense import WEIGHT, Answer
from tests.model.stock import gradients_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


def dense_as_called(
    model: Any,
    documents: Sequence[np.ndarray],
    masks: Sequence[np.ndarray] | None = None,
    weights: Sequence[float] | None = None,
) -> Answer:
    """The losses and gradients of a model with depths; `masks` and `weights` as in `dense`."""
    depths = [*model.mtp.layers]
    sums: list[Any] = [0.0] * (1 + len(depths))
    counts = [0] * (1 + len(depths))
    for i, document in enumerate(documents):
        ids, mask = torch.from_numpy(document), torch.from_numpy(masks[i]) if masks else torch.ones(len(document)) > 0
        for ahead, logits in enumerate(_logits_of_depths(model, ids)):
            losses = F.cross_entropy(logits[: len(ids) - 1 - ahead], ids[1 + ahead :], reduction="none")
            sums[ahead] = sums[ahead] + (weights[i] if weights else 1.0) * losses[mask[1 + ahead :]].sum()
            counts[ahead] += int(mask[1 + ahead :].sum())
    means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
    (means[0] + WEIGHT / len(depths) * sum(means[1:])).backward()
    return Answer(float(means[0]), tuple(map(float, means[1:])), gradients_of(model))


def _logits_of_depths(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """(T, V) of the model, then of each depth that has a target."""
    hidden, call = _base(model, ids)
    logits = [_head(model, ids, hidden)]
    for ahead, depth in enumerate(model.mtp.layers, 1):
        if len(ids) > 1 + ahead:
            hidden = _next(model, depth, hidden, ids.roll(-ahead), call)
            logits.append(_head(model, ids, hidden))
    return logits


def _base(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Call]:
    """The model's last hidden states, and what it calls the layer with that its depths are copies of."""
    calls: list[Call] = []
    layer = [*decoder_layers(model).values()][_copied(model)]
    note = lambda _, args, kwargs: calls.append((args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}))  # noqa: E731
    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    hidden = base_model(model)(input_ids=ids[None], use_cache=False)[0]
    handle.remove()
    return hidden, calls[0]


def _next(model: Any, depth: Any, hidden: Tensor, ids: Tensor, call: Call) -> Tensor:
    later = model.get_input_embeddings()(ids[None])
    args, kwargs = LATER.get(model.config.get_text_config().model_type, lambda *_: call)(model, call, later, ids)
    x = depth.eh_proj(torch.cat([depth.enorm(later), depth.hnorm(hidden)], -1))
    for block in depth.mtp_block if isinstance(depth.mtp_block, MtpBlocks) else [depth.mtp_block]:
        out = block(x, *args, **kwargs)
        x = out if isinstance(out, Tensor) else out[0]
    return depth.post_norm(x)


def _head(model: Any, ids: Tensor, hidden: Tensor) -> Tensor:
    """Logits (T, V) of the model's own forward, where what is around its layers answers with these hidden states."""

    def answer(_: Any, __: Any, output: Any) -> Any:
        output["last_hidden_state"] = hidden
        return output

    around = model.get_submodule(layer_list(model)[0].rpartition(".")[0])
    handle = around.register_forward_hook(answer)
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    handle.remove()
    return logits


def _copied(model: PreTrainedModel) -> int:
    """The last layer, or the last that has keys of its own."""
    config: Any = model.config.get_text_config()
    return len(decoder_layers(model)) - 1 - getattr(config, "num_kv_shared_layers", 0)


def _zamba2(model: Any, call: Call, later: Tensor, ids: Tensor) -> Call:
    return (later, *call[0][1:]), call[1]


def _gemma4(model: Any, call: Call, later: Tensor, ids: Tensor) -> Call:
    text, kwargs = decoder_model(model), call[1] | {"shared_kv_states": {}}
    if not text.hidden_size_per_layer_input:
        return call[0], kwargs
    inputs = text.project_per_layer_inputs(later, text.get_per_layer_inputs(ids[None], later))
    return (inputs[:, :, _copied(model)],), kwargs


LATER: dict[str, Callable[[Any, Call, Tensor, Tensor], Call]] = {"zamba2": _zamba2, "gemma4_text": _gemma4}

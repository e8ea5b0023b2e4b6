"""An encoder of a multimodal model under a home of its own, and how its rows enter the language model.

Rows of items enter at the input embedding, and those of DeepStack after the first layers too, by hooks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.bridge.bridge import AHEAD, add_rows, splice_rows
from longspan.comm import SequenceShard, World
from longspan.model.layers import decoder_layers
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.layer_arguments import find_layer_shard
from longspan.plan.cost.cost import DEFAULT_COST, Cost


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder with its projector, its world, and how its items are dealt out.

    `module(inputs)` takes a list of what the documents' `read` gives for each item, and returns their rows (n, D) end
    to end, D being the language model's width; where several slots may share an item (`max_cp` above 1), it is called
    with `shard=` too and returns this rank's rows. `world` is of the encoder's own Layout, without pipeline stages,
    over the language model's ranks.

    Items are dealt to the encoder's slots by `plan_dynamic`, priced by `cost`, an item being a document of its rows: in
    waves of at most `max_rows_per_slot` rows a slot. `recompute` encodes each wave again before its backward pass
    instead of keeping what that needs. An encoder is frozen if none of its parameters requires a gradient: nothing
    flows back to it, and in training it stays in the mode that it is in.

    With `deep_layers` L its rows are (n, D · (1 + L)): the first D enter at the input embedding, and part k is added to
    what decoder layer k returns, k from 0 (DeepStack, https://arxiv.org/abs/2406.04334).

    `in_spans`: in every layer of the language model the rows of an item see each other in both directions, those of
    items side by side too, as Gemma 3's images do.
    """

    module: nn.Module
    world: World
    max_rows_per_slot: int | None = None
    max_cp: int = 1
    cost: Cost = DEFAULT_COST
    recompute: bool = False
    deep_layers: int = 0
    in_spans: bool = False

    @property
    def frozen(self) -> bool:
        """Whether no parameter requires a gradient."""
        return not any(parameter.requires_grad for parameter in self.module.parameters())


def span_modalities(encoders: Mapping[str, Encoder]) -> tuple[str, ...]:
    """Return the modalities whose items' rows see each other."""
    return tuple(modality for modality, encoder in encoders.items() if encoder.in_spans)


def hook_item_rows(model: PreTrainedModel | PipelineModel, encoders: Sequence[Encoder]) -> None:
    """Hook a prepared language model: rows of items enter at its embedding, those of DeepStack at its first layers."""
    for root, embedding_model, has_first_layers in _embedding_parts(model):
        _SpliceHook(root, embedding_model.get_input_embeddings(), tuple(encoders))
        if has_first_layers:
            deep_layers = max((encoder.deep_layers for encoder in encoders), default=0)
            for index, layer in enumerate([*decoder_layers(embedding_model).values()][:deep_layers]):
                layer.register_forward_hook(partial(_add_rows, index), with_kwargs=True)


def _embedding_parts(model: PreTrainedModel | PipelineModel) -> Iterator[tuple[nn.Module, PreTrainedModel, bool]]:
    """Yield (module that is called with a shard, model with the input embedding, whether it has the first layers).

    Under a pipeline these are the first stage and, with multi-token prediction, which embeds later tokens, the last.
    A rank without these stages yields nothing.
    """
    if isinstance(model, PipelineModel):
        for stage in model.stages:
            if stage.first or (stage.last and model.depths):
                yield stage, stage.model, stage.first
    else:
        yield model, model, True


def _add_rows(index: int, layer: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any) -> Any:
    shard = kwargs.get("shard") or find_layer_shard()  # some models call layers without the keyword
    if not isinstance(shard, SequenceShard):
        return out
    if isinstance(out, tuple):
        return (add_rows(out[0], shard, index), *out[1:])
    return add_rows(out, shard, index)


class _SpliceHook:
    """Splices rows of items into an embedding's output while `root`, its model, runs with a shard."""

    def __init__(self, root: nn.Module, embedding: nn.Module, encoders: Sequence[Encoder]) -> None:
        self._encoders = encoders
        self._shard: SequenceShard | None = None
        root.register_forward_pre_hook(self._note_shard, with_kwargs=True)
        root.register_forward_hook(self._forget_shard, always_call=True)
        self._ahead = 0  # how many tokens ahead of its row the embedding is called now (multi-token prediction)
        embedding.register_forward_pre_hook(self._take_ahead, with_kwargs=True)
        embedding.register_forward_hook(self._splice_rows)

    def _note_shard(self, root: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        shard = kwargs["stage_input"].shard if "stage_input" in kwargs else kwargs.get("shard")
        self._shard = shard if isinstance(shard, SequenceShard) else None

    def _forget_shard(self, *_: Any) -> None:
        self._shard = None

    def _take_ahead(self, embedding: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Note and remove AHEAD, the keyword of calls for later tokens, which the embedding's forward does not know."""
        self._ahead = kwargs.get(AHEAD, 0)
        return args, {name: value for name, value in kwargs.items() if name != AHEAD}

    def _splice_rows(self, embedding: nn.Module, args: Any, embeddings: Tensor) -> Tensor:
        if self._shard is None:
            return embeddings
        if torch.is_grad_enabled() and not embeddings.requires_grad and not all(x.frozen for x in self._encoders):
            # Under a frozen language model all ranks enter its backward pass, also those that got no rows.
            embeddings = embeddings.detach().requires_grad_()
        return splice_rows(embeddings, self._shard, self._ahead)

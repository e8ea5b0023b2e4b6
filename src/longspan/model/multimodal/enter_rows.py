"""How rows of items enter a language model: at its input embedding, and after its first layers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.bridge.splice import AHEAD, add_rows, splice
from longspan.comm import SequenceShard
from longspan.model.layers import decoder_layers
from longspan.model.multimodal.encoder import Encoder
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.seams.layer_arguments import shard_of_layer


def enter_rows(model: PreTrainedModel | PipelineModel, encoders: Sequence[Encoder]) -> None:
    """Have a prepared language model take what its shards have of these encoders' rows."""
    for root, inside, first in _parts_that_embed(model):
        _SpliceHook(root, inside.get_input_embeddings(), tuple(encoders))
        if first:
            _add_after_layers(inside, max((encoder.deep_layers for encoder in encoders), default=0))


def _parts_that_embed(model: PreTrainedModel | PipelineModel) -> Iterator[tuple[nn.Module, PreTrainedModel, bool]]:
    """What is called with a shard, the model with the input embedding, and whether its first layers are there.

    Nothing where tokens are embedded elsewhere; depths of multi-token prediction embed them on the last stage.
    """
    if isinstance(model, PipelineModel):
        embed = ((stage, stage.first) for stage in model.stages if stage.first or (stage.last and model.depths))
        yield from ((stage, stage.model, first) for stage, first in embed)
    else:
        yield model, model, True


def _add_after_layers(model: PreTrainedModel, count: int) -> None:
    """Have the first layers return their hidden states with the rows that their shard has for them added."""
    for index, layer in enumerate([*decoder_layers(model).values()][:count]):
        layer.register_forward_hook(partial(_add_to_output, index), with_kwargs=True)


def _add_to_output(index: int, layer: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any) -> Any:
    shard = kwargs.get("shard") or shard_of_layer()
    if not isinstance(shard, SequenceShard):
        return out
    if isinstance(out, tuple):
        return (add_rows(out[0], shard, index), *out[1:])
    return add_rows(out, shard, index)


class _SpliceHook:
    """Splices rows into what an embedding returns during a call of its model with a shard."""

    def __init__(self, root: nn.Module, embedding: nn.Module, encoders: Sequence[Encoder]) -> None:
        self._encoders = encoders
        self._shard: SequenceShard | None = None
        self._ahead = 0  # of the call of the embedding that is running
        root.register_forward_pre_hook(self._enter, with_kwargs=True)
        root.register_forward_hook(self._leave, always_call=True)
        embedding.register_forward_pre_hook(self._take_ahead, with_kwargs=True)
        embedding.register_forward_hook(self._splice)

    def _enter(self, root: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        shard = kwargs["stage_input"].shard if "stage_input" in kwargs else kwargs.get("shard")
        self._shard = shard if isinstance(shard, SequenceShard) else None

    def _leave(self, *_: Any) -> None:
        self._shard = None

    def _take_ahead(self, embedding: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take the keyword for later tokens away, which the embedding's own forward does not know."""
        self._ahead = kwargs.get(AHEAD, 0)
        return args, {name: value for name, value in kwargs.items() if name != AHEAD}

    def _splice(self, embedding: nn.Module, args: Any, embeddings: Tensor) -> Tensor:
        if self._shard is None:
            return embeddings
        if torch.is_grad_enabled() and not embeddings.requires_grad and not all(x.frozen for x in self._encoders):
            # Under a frozen language model all ranks enter its backward pass, also those that got no rows.
            embeddings = embeddings.detach().requires_grad_()
        return splice(embeddings, self._shard, self._ahead)

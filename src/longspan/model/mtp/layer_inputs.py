"""What the last decoder layer is called with in a pass: depths, which copy it, are called with the same."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from longspan.bridge.item_rows import embedding_arguments
from longspan.errors import ModelError
from longspan.model.layers import architecture_name, mtp_depths, named_layer_list

LayerCall = tuple[tuple[Any, ...], Mapping[str, Any]]  # what a layer is called with, without hidden states
_NOT_FOR_DEPTHS = ("hidden_states", "router")  # some rows of a depth have no token: its routers are not counted


@dataclass(eq=False)
class LayerInputs:
    """What the last decoder layer was called with, recorded by a hook while a pass of the model runs."""

    _model: PreTrainedModel
    call: LayerCall | None = None

    def record_call(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the arguments of a call: a forward pre-hook."""
        self.call = args, kwargs

    def make_call(self) -> LayerCall:
        """Return the inputs of a depth's layer beside hidden states. ModelError if they depend on parameters."""
        args, kwargs = self.call or ((), {})
        call = args[1:], {name: value for name, value in kwargs.items() if name not in _NOT_FOR_DEPTHS}
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(call)):
            raise ModelError(
                f"{architecture_name(self._model)} gives its last decoder layer, beside hidden states, tensors that "
                "depend on its parameters, as embeddings of the rows' own tokens or keys of earlier layers; a depth "
                "has none of later tokens: train it without multi-token prediction (no mtp=, mtp.num_layers = 0)"
            )
        return call

    def compute_mtp_states(self, hidden: Tensor, future_ids: Tensor, shard: Any) -> tuple[Tensor, ...]:
        """Compute the hidden states (T, D) of each depth, of the model's (1, T, D) and ids (depths, T) of later tokens.

        A placeholder of images has the image's row, which the `shard` holds, as its embedding.
        """
        embedding: Any = self._model.get_input_embeddings()
        states = list[Tensor]()
        args, kwargs = self.make_call()
        for number, (depth, ids) in enumerate(zip(mtp_depths(self._model), future_ids, strict=True), 1):
            embedded = embedding(ids[None], **embedding_arguments(shard, number))
            hidden = depth(embedded, hidden, *args, **kwargs)
            states.append(hidden.squeeze(0))
        return tuple(states)


@contextmanager
def record_layer_inputs(model: PreTrainedModel) -> Iterator[LayerInputs]:
    """Record what a pass inside gives the last decoder layer, which depths copy."""
    inputs = LayerInputs(model)
    last_layer = named_layer_list(model)[1][-1]
    handle = last_layer.register_forward_pre_hook(inputs.record_call, with_kwargs=True, prepend=True)
    try:
        yield inputs
    finally:
        handle.remove()

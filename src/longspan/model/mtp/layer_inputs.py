"""The inputs of a depth's layer besides hidden states: those that the model gives the layer which the depth copies.

Some inputs may be made of the rows' own tokens. A depth's layer then gets them for the tokens that the depth reads: the
model's own forward runs on these tokens with a stand-in for every layer, which notes the arguments of its call. So
Zamba 2's layers get the embedding of the later tokens, and Gemma 4's their inputs for each layer. Not covered are
tensors from earlier layers, such as keys and values that Gemma 4's last layers share.
Which layer is copied is found in `add_depths.py`.
"""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import (
    Absent,
    architecture_name,
    final_norm,
    layer_list,
    shallow_module,
)

LayerCall = tuple[tuple[Any, ...], Mapping[str, Any]]  # what a layer is called with, without hidden states
_NOT_FOR_DEPTHS = ("hidden_states", "router")  # some rows of a depth have no token: its routers are not counted


@dataclass(frozen=True)
class CopiedLayer:
    """The layer that depths copy, by its index.

    `of_tokens`: besides hidden states it is called with tensors made of the rows' tokens. `outputs`: how many values a
    layer returns in a tuple; 0: it returns a tensor.
    """

    index: int
    of_tokens: bool = False
    outputs: int = 0


class Note:
    """What a layer was called with: hidden states, and its other arguments."""

    def __init__(self) -> None:
        self.hidden_states: Tensor | None = None
        self.call: LayerCall = ((), {})

    @property
    def is_set(self) -> bool:
        """Whether the layer was called."""
        return self.hidden_states is not None


class NotedLayer(Absent):
    """A stand-in for a decoder layer, which returns its hidden states and notes the arguments of its call.

    The note is an object that is filled, not an attribute that is set: a pass on the meta device restores attributes.
    """

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__(layer, outputs)
        self.note: Note = Note()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note the call, and return the hidden states as they are."""
        self.note.hidden_states, self.note.call = x, (args, _depth_arguments(kwargs))
        return super().forward(x)


class _Embedded(nn.Module):
    """A stand-in for an embedding, which returns given rows (1, T, D) whatever the ids are."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.rows


def copy_without_layers(
    model: PreTrainedModel, embedded: Tensor, outputs: int, *, keep: Container[int] = ()
) -> tuple[Any, list[nn.Module]]:
    """Copy the module around a model's decoder layers with stand-ins for the layers; returns (copy, its layers).

    A stand-in returns `outputs` values, as `CopiedLayer` counts them. Layers with an index in `keep` are the model's
    own. The embedding is replaced by the rows `embedded` (1, T, D), and there is no norm after the layers. Modules
    without parameters, such as rotary embeddings, may store tensors of a pass: for a pass on the meta device these
    modules are copied, so that the model's own keep their numbers.
    """
    name, layers = layer_list(model)
    path, _, attribute = name.rpartition(".")
    parent, embedding, norm = model.get_submodule(path), model.get_input_embeddings(), final_norm(model)
    bare, stand_ins = shallow_module(parent), shallow_module(layers)
    for child, module in parent.named_children():
        if module is embedding:
            bare._modules[child] = _Embedded(embedded)
        elif module is norm:
            bare._modules[child] = Absent()
        elif embedded.is_meta and not any(True for _ in module.parameters()):
            bare._modules[child] = deepcopy(module)
    for child, layer in layers.named_children():
        stand_ins._modules[child] = layer if int(child) in keep else NotedLayer(layer, outputs)
    bare._modules[attribute] = stand_ins
    return bare, [*stand_ins]


class LayerInputs:
    """The inputs of depths' layers besides hidden states, noted by a hook while a pass of the model runs."""

    def __init__(self, model: PreTrainedModel, copied: CopiedLayer) -> None:
        self._model, self._copied = model, copied
        # The arguments of the layer, or, where inputs are made of tokens, of what is around the layers.
        self._noted: LayerCall = (), {}

    def note_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of a call: a forward pre-hook of the copied layer, or of the module around all layers."""
        self._noted = args, kwargs

    def make_call(self, ids: Tensor, embedded: Tensor) -> LayerCall:
        """Return the inputs, without hidden states, of a depth's layer that reads ids (T,) embedded as (1, T, D).

        If inputs are made of tokens, the model's forward makes them anew from `ids`, with a stand-in for every layer.
        Raises ModelError if the layer's inputs are made of tokens (of embeddings: they depend on parameters), and that
        was not seen when depths were added.
        """
        args, kwargs = self._noted
        if not self._copied.of_tokens:
            call = args[1:], _depth_arguments(kwargs)
            if depends_on_parameters(call):
                raise ModelError(
                    f"{architecture_name(self._model)} gives its last decoder layer, beside hidden "
                    "states, tensors that depend on its parameters, and its forward does not show on the meta device "
                    "how they are made of later tokens; train it without multi-token prediction (no mtp=, "
                    "mtp.depths = 0)"
                )
            return call
        layerless_model, layers = copy_without_layers(self._model, embedded, self._copied.outputs)
        arguments = dict(zip(signature(layerless_model.forward).parameters, args, strict=False)) | dict(kwargs)
        other_arguments = {  # floats hold values of the rows' tokens (embeddings), integers do not
            name: value
            for name, value in arguments.items()
            if name != "input_ids" and not (isinstance(value, Tensor) and torch.is_floating_point(value))
        }
        layerless_model.forward(input_ids=ids[None], **other_arguments)  # without hooks, `note_call` among them
        layer: Any = layers[self._copied.index]
        return layer.note.call


@contextmanager
def layer_inputs(model: PreTrainedModel, copied: CopiedLayer) -> Iterator[LayerInputs]:
    """Note the arguments with which a pass of the model, in the `with` block, calls the layer that depths copy.

    If the layer's inputs are made of tokens, the arguments of the module around the layers are noted instead.
    """
    inputs, (name, layers) = LayerInputs(model, copied), layer_list(model)
    noted = model.get_submodule(name.rpartition(".")[0]) if copied.of_tokens else layers[copied.index]
    handle = noted.register_forward_pre_hook(inputs.note_call, with_kwargs=True, prepend=True)
    try:
        yield inputs
    finally:
        handle.remove()


def depends_on_parameters(call: LayerCall) -> bool:
    """Return whether a tensor among these inputs depends on a parameter, in a pass with gradients."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((call[0], dict(call[1]))))


def _depth_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _NOT_FOR_DEPTHS}

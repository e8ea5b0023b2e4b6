"""The inputs of a depth's layer besides hidden states: what the model gives the layer that it is a copy of.

Where some of that is of the rows' own tokens, a depth's layer gets what the model would give it for the tokens that the
depth reads: the model's own forward runs on these with a stand-in for every layer, which notes what it is called with.
So Zamba 2's layers get the embedding of the later tokens, and Gemma 4's their inputs of each layer. What earlier layers
made, as keys and values that Gemma 4's last layers share, is in none of that. Which layer is copied is found out in
`exactness/depth_layer.py`.
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
from longspan.model.layers import Absent, architecture_name, final_norm, layer_list, shallow_module

LayerCall = tuple[tuple[Any, ...], Mapping[str, Any]]  # what a layer is called with, without hidden states
_NOT_FOR_DEPTHS = ("hidden_states", "router")  # some rows of a depth have no token: its routers are not counted


@dataclass(frozen=True)
class CopiedLayer:
    """The layer that depths copy, by its index; `of_tokens`: it is called with what is made of the rows' tokens.

    `outputs`: how many values a layer returns in a tuple; 0: a tensor.
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
    """Stands for a decoder layer, hands hidden states on, and notes what it was called with.

    The note is no attribute that changes: a pass on the meta device puts those back.
    """

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__(layer, outputs)
        self.note: Note = Note()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the first input as it is."""
        self.note.hidden_states, self.note.call = x, (args, _depth_arguments(kwargs))
        return super().forward(x)


class _Embedded(nn.Module):
    """Stands for an embedding whose rows are there already."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.rows


def copy_without_layers(
    model: PreTrainedModel, embedded: Tensor, outputs: int, *, keep: Container[int] = ()
) -> tuple[Any, list[nn.Module]]:
    """Copy the module around a model's decoder layers with stand-ins for them, and these; layers `keep` are themselves.

    Its embedding gives the rows `embedded` (1, T, D) whatever the ids are, and it has no norm after the layers. Modules
    without parameters, such as rotary embeddings, may keep tensors of the device of a pass. So for a pass on the meta
    device they are copied: the model's own would be left with tensors that hold no numbers.
    """
    name, layers = layer_list(model)
    path, _, attribute = name.rpartition(".")
    around, embedding, norm = model.get_submodule(path), model.get_input_embeddings(), final_norm(model)
    bare, stands = shallow_module(around), shallow_module(layers)
    for child, module in around.named_children():
        if module is embedding:
            bare._modules[child] = _Embedded(embedded)
        elif module is norm:
            bare._modules[child] = Absent()
        elif embedded.is_meta and not any(True for _ in module.parameters()):
            bare._modules[child] = deepcopy(module)
    for child, layer in layers.named_children():
        stands._modules[child] = layer if int(child) in keep else NotedLayer(layer, outputs)
    bare._modules[attribute] = stands
    return bare, [*stands]


class LayerInputs:
    """The inputs of depths' layers besides hidden states, filled while a pass of the model runs."""

    def __init__(self, model: PreTrainedModel, copied: CopiedLayer) -> None:
        self._model, self._copied = model, copied
        # The arguments of the layer, or, where inputs are made of tokens, of what is around the layers.
        self._noted: LayerCall = (), {}

    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the call of a layer: a forward pre-hook."""
        self._noted = args, kwargs

    def make_call(self, ids: Tensor, embedded: Tensor) -> LayerCall:
        """Return the inputs of a layer that reads these ids (T,), whose embedding is (1, T, D).

        Raises ModelError if the layer gets inputs made of its own rows, and that was not seen when depths were added.
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
        other_arguments = {
            name: value for name, value in arguments.items() if not (name == "input_ids" or _depends_on_rows(value))
        }
        layerless_model.forward(input_ids=ids[None], **other_arguments)
        layer: Any = layers[self._copied.index]
        return layer.note.call


@contextmanager
def layer_inputs(model: PreTrainedModel, copied: CopiedLayer) -> Iterator[LayerInputs]:
    """Note inside what a pass of the model gives the layer that depths copy."""
    inputs, (name, layers) = LayerInputs(model, copied), layer_list(model)
    noted = model.get_submodule(name.rpartition(".")[0]) if copied.of_tokens else layers[copied.index]
    handle = noted.register_forward_pre_hook(inputs.note, with_kwargs=True, prepend=True)
    try:
        yield inputs
    finally:
        handle.remove()


def depends_on_parameters(call: LayerCall) -> bool:
    """Return whether a tensor among these inputs depends on a parameter, in a pass with gradients."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((call[0], dict(call[1]))))


def _depth_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _NOT_FOR_DEPTHS}


def _depends_on_rows(value: Any) -> bool:
    """Return whether an input of the model is made of the rows' tokens, as hidden states are and integers are not."""
    return isinstance(value, Tensor) and torch.is_floating_point(value)

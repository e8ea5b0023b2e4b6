"""The parts of a causal language model that stages and sequence parallelism rely on: which are called, and how.

This is found by running a copy of the model whose parts are stand-ins. `copy_for_stage` makes it, and makes pipeline
stages, which keep some of the parts, by the same rules.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import Absent, decoder_model, other_towers, shallow_module, text_name
from longspan.model.mtp.depths import PREFIX, model_depths


@dataclass(frozen=True)
class ModelParts:
    """Where a model's parts are, by name inside its base model: modules before the layers, the layers, those after.

    `outputs`: how many values a layer returns in a tuple; 0: a tensor.
    """

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]
    outputs: int = 0


_FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm")
_USUAL = f"an embedding, a list of layers and a norm after them ({', '.join(_FINAL_NORMS)})"


def usual_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the base model's embedding, list of layers and norm after them, of each that it has."""
    base = decoder_model(model)
    embedding = [name for name, module in base.named_children() if module is model.get_input_embeddings()]
    layers = [name for name, module in base.named_children() if isinstance(module, nn.ModuleList)]
    norms = [name for name in _FINAL_NORMS if isinstance(getattr(base, name, None), nn.Module)]
    return (*embedding[:1], *layers[:1], *norms[:1])


def find_parts(model: PreTrainedModel) -> ModelParts:
    """Find the parts that the model's own pipeline plan names, or else the usual three if they are there.

    Parts are modules of the base model in the order in which they run: some before the layers, one list of layers, some
    after it. Raises ModelError for a model without such parts, or with encoders or parameters beside them.
    """
    base, name = decoder_model(model), type(model).__name__
    plan = getattr(model.config.get_text_config(), "base_model_pp_plan", None)
    order: list[str] = [*(plan or usual_parts(model))]
    lists = [part for part in order if isinstance(getattr(base, part, None), nn.ModuleList)]
    are_here = all(isinstance(getattr(base, part, None), nn.Module) for part in order) and (plan or len(order) == 3)
    if base is model or len(lists) != 1 or not are_here:
        expected = f"its pipeline plan names {', '.join(order)}" if plan else f"stages need {_USUAL}"
        raise ModelError(
            f"{name} cannot be cut into pipeline stages: {expected}, its base model "
            f"has {', '.join(n for n, _ in base.named_children())}; use pp 1"
        )
    index = order.index(lists[0])
    parts = parts_with_outputs(model, ModelParts(tuple(order[:index]), lists[0], tuple(order[index + 1 :])))
    if towers := other_towers(model):
        raise ModelError(
            f"{name} has encoders of other modalities ({', '.join(type(tower).__name__ for tower in towers[:4])}), "
            "which pipeline stages have no place for; use longspan.prepare(model, world, encoder=Layout(...)), which "
            "gives them a home of their own, or pp 1"
        )
    if others := [n for n, _ in base.named_parameters() if n.partition(".")[0] not in order]:
        raise ModelError(
            f"{name} has parameters that its pipeline plan does not place ({', '.join(others[:4])}); use pp 1"
        )
    return parts


def parts_with_outputs(model: PreTrainedModel, parts: ModelParts) -> ModelParts:
    """Return the parts with `outputs`, how many values the base model's forward takes from a layer: found by trial.

    0 stands for a tensor, other numbers for a tuple. If the forward runs with none of 0, 1 and 2, the parts stay as
    they are.
    """
    for outputs in (0, 1, 2):
        with suppress(Exception):  # whatever a forward raises of layers that return something else
            _, out, (x, *_) = _trace_calls(model, candidate := replace(parts, outputs=outputs))
            if out.shape == x.shape:  # a forward that indexes a tensor as if it were a tuple returns other shapes
                return candidate
    return parts


class PartCall(NamedTuple):
    """One call of a part in a forward pass.

    `reads_more`: whether it got earlier hidden states in addition to those that the call before it returned. If a
    single argument was made of earlier states, and is the model's first hidden states unchanged, `first_again` is its
    position or name; else None. `keywords` are the names of its keyword arguments.
    """

    part: str
    reads_more: bool
    first_again: int | str | None
    keywords: frozenset[str]


def trace_parts(model: PreTrainedModel, parts: ModelParts, **more: Any) -> tuple[list[PartCall], bool]:
    """Run a base model's own forward on two rows of hidden states, with a stand-in for each part that hands them on.

    `more` are keyword arguments of the forward. Returns the calls of its parts, and whether the forward's output is
    exactly what the last part returned, and was not made of what earlier parts returned. On the meta device, where
    tensors have no values, only shapes are compared.
    """
    calls, out, returned = _trace_calls(model, parts, **more)
    x = returned[0]
    equal = out.shape == x.shape and (x.is_meta or torch.equal(out, x))
    return calls, equal and not _depends_on([out], returned[:-1])


def _trace_calls(model: PreTrainedModel, parts: ModelParts, **more: Any) -> tuple[list[PartCall], Tensor, list[Tensor]]:
    """Run two rows through the base model's own forward, with stand-ins for all parts, which return what they get.

    Returns the calls of parts, the forward's output, and a list of hidden states: the first input, then what each call
    returned.
    """
    bare = decoder_model(copy_for_stage(model, parts, range(0), first=False, last=False))
    size = model.config.get_text_config().hidden_size
    device = next((buffer.device for buffer in bare.buffers()), torch.device("cpu"))  # of the rotary frequencies
    x = torch.linspace(-1, 1, 2 * size, device=device).view(1, 2, size).requires_grad_()
    returned, calls = [x], list[PartCall]()

    def note_call(part: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Note a part's call, and whether it read hidden states other than the newest: a forward hook.

        What the part returns becomes a leaf of autograd, so that `_depends_on` can trace later calls back to it.
        """
        reads_earlier = _depends_on([args, kwargs], returned[:-1])
        first_again = _find_first_states(args, kwargs, returned)
        calls.append(PartCall(part, reads_earlier, first_again, frozenset(kwargs)))
        hidden = out[0] if isinstance(out, tuple) else out
        returned.append(hidden.detach().requires_grad_())
        return (returned[-1], *out[1:]) if isinstance(out, tuple) else returned[-1]

    for name, module in bare.named_modules():
        if isinstance(module, Absent):
            module.register_forward_hook(partial(note_call, name), with_kwargs=True)
    with torch.enable_grad():
        positions = torch.arange(2, device=device)[None]
        return calls, bare(inputs_embeds=x, position_ids=positions, use_cache=False, **more)[0], returned


def _find_first_states(args: Sequence[Any], kwargs: Mapping[str, Any], returned: Sequence[Tensor]) -> int | str | None:
    """Find the argument of a layer, after its input at position 0, that is the model's first hidden states again.

    `returned` are these first states, then what each part before the layer returned. None if there is no such argument,
    if it was made of other states too, or if several arguments were made of earlier states: stages hand on neither.
    """
    arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    earlier = [key for key, value in arguments.items() if _depends_on(value, returned[:-1])]
    if len(earlier) != 1 or earlier[0] == 0:
        return None
    value, first = arguments[earlier[0]], returned[0]
    is_first = isinstance(value, Tensor) and value.shape == first.shape and (first.is_meta or torch.equal(value, first))
    return earlier[0] if is_first and not _depends_on(value, returned[1:]) else None


def _depends_on(values: Any, tensors: Sequence[Tensor]) -> bool:
    sums = [leaf.sum() for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not sums or not tensors:
        return False
    gradients = torch.autograd.grad(sums, tensors, retain_graph=True, allow_unused=True)
    return any(gradient is not None for gradient in gradients)


class _Entry(Absent):
    """Stands on a later stage for the first part that hidden states go through, and returns those that the stage got.

    It does not pass its own input on, as the base model's forward has changed that once more, after the first stage
    did: Granite's scales its embeddings before the first layer.
    """

    rows: Tensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x if self.rows is None else self.rows)

    def take_rows(self, base: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.rows = kwargs.get("inputs_embeds")

    def forget_rows(self, base: nn.Module, args: object, out: object) -> None:
        self.rows = None


def _replace_first_part(base: nn.Module, part: str, outputs: int) -> None:
    """Put an `_Entry` in place of `part`, the first part of a later stage's base model that hidden states go through.

    A part with a dot in its name is a layer, which returns `outputs` values; any other part returns a tensor.
    """
    parent, _, name = part.rpartition(".")
    entry = _Entry(base.get_submodule(part), outputs if parent else 0)
    base.get_submodule(parent)._modules[name] = entry
    base.register_forward_pre_hook(entry.take_rows, with_kwargs=True)
    base.register_forward_hook(entry.forget_rows, always_call=True)


def copy_for_stage(
    model: PreTrainedModel, parts: ModelParts, layers: range, *, first: bool, last: bool
) -> PreTrainedModel:
    """Copy the model for one stage, with stand-ins for what other stages hold; `layers` are the indices of its layers.

    The first stage has the parts before the layers; the last stage has the parts after them, the head, and the parts
    before the layers again if the model needs its embedding at the end. A tied head is on the first stage too. A
    later stage has an `_Entry` in place of the first part that is not the embedding (a layer, if there is no such
    part): it hands on the hidden states that arrive. The given model is not changed.
    """
    tied, embeds = is_tied(model), embeds_at_the_end(model)
    stage = base = shallow_module(model)
    for name in filter(None, text_name(model).split(".")):  # copies also a wrapper's modules around its text model
        base._modules[name] = shallow_module(base._modules[name])
        base = base._modules[name]
    parts_here = dict.fromkeys(parts.before, first or (embeds and last)) | dict.fromkeys(parts.after, last)
    embeddings = [name for name, module in base.named_children() if module is model.get_input_embeddings()]
    for name, module in base.named_children():
        if name == parts.layers:
            base._modules[name] = _stage_layer_list(module, layers, parts.outputs)
        elif name in parts_here:
            base._modules[name] = module if parts_here[name] else Absent()
        else:
            base._modules[name] = copy.deepcopy(module)  # rotary embeddings: only buffers
    entry = next((part for part in parts.before if part not in embeddings), f"{parts.layers}.0")
    if not first and isinstance(base.get_submodule(entry), Absent):  # no part or layer of this stage's own
        _replace_first_part(base, entry, parts.outputs)
    for name, _ in list(model.named_children()):  # the head, and depths of multi-token prediction (PREFIX)
        if name != text_name(model).partition(".")[0] and not (last or (tied and first and name != PREFIX)):
            stage._modules[name] = Absent()
    return stage


def _stage_layer_list(layers: nn.Module, indices: range, outputs: int) -> nn.ModuleList:
    stage_layers: nn.ModuleList = shallow_module(layers)
    for i, (name, layer) in enumerate(layers._modules.items()):
        if i not in indices:
            stage_layers._modules[name] = Absent(layer, outputs)
    return stage_layers


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the embedding and the head are one parameter."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def embeds_at_the_end(model: PreTrainedModel) -> bool:
    """Return whether what comes after the layers needs the embedding.

    A head that is tied to it does, or multi-token prediction.
    """
    return is_tied(model) or bool(model_depths(model))


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore at the end of the `with` block the mode, training or evaluation, that every module had before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                vars(module)["training"] = training  # nn.Module's own assignment checks types many times

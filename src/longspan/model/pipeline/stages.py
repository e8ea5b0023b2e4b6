"""Stages of a pipeline: which decoder layers go where, and a model's own forward over one stage's layers alone.

A stage is a copy of the model that shares the modules of its layers and has stand-ins for all others: its forward is
the architecture's own, so that masks, rotary embeddings, windows and soft caps are whatever they are there, and every
layer keeps its global index and name. Where the embedding, the layers and the norm are is read from the model's
pipeline plan (`config.base_model_pp_plan`, module to names of inputs and outputs). Schedules are in `schedules.py`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError

Finish = Callable[[nn.Module, Mapping[str, Any]], Tensor]


def layers_of_stages(layers: int, stages: int) -> tuple[range, ...]:
    """Consecutive layers for each stage, at least one: the embedding and the head count as one layer each.

    Layers that remain go to the stage with the least to do, the last of equals: in 1F1B earlier stages keep the
    activations of more micro-batches.

    >>> [len(part) for part in layers_of_stages(36, 4)]
    [8, 9, 10, 9]

    Raises ModelError where there are more stages than layers.
    """
    if stages > layers:
        raise ModelError(
            f"{stages} pipeline stages (pp x virtual stages) for {layers} layers; each stage needs at least one: "
            f"use at most {layers} stages"
        )
    load = [1 + (stage == 0) + (stage == stages - 1) for stage in range(stages)]
    counts = [1] * stages
    for _ in range(layers - stages):
        least = min(range(stages), key=lambda stage: (load[stage], -stage))
        load[least] += 1
        counts[least] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


class Absent(nn.Module):
    """Stands where another rank holds a module, and hands its first input on."""

    def forward(self, x: Tensor, *others: Any, **more: Any) -> Tensor:
        """The first input as it is."""
        return x


class Call:
    """What a stage needs beside its input: token ids (1, T) for the first, `finish` for the last.

    A plain class, as SequenceShard is: FSDP2 and torch's schedules look into dataclasses and trees of tensors.

    `finish(model, arguments)` calls the model and makes the last stage's output from it, in training the loss (a
    scalar). `more` goes to every stage's layers, as `shard` does.
    """

    __slots__ = ("finish", "ids", "more", "shard")

    def __init__(
        self, shard: SequenceShard, ids: Tensor, finish: Finish, more: Mapping[str, Any] | None = None
    ) -> None:
        self.shard, self.ids, self.finish, self.more = shard, ids, finish, more or {}


class Stage(nn.Module):
    """One stage of a model: hidden states (1, T, D) of the stage before, or token ids, to those of its last layer.

    `index` of `count` in model order; `layers` are global indices. `model` is the copy with stand-ins. `tied`: the
    embedding and the head are one parameter in the whole model.
    """

    def __init__(self, model: PreTrainedModel, index: int, layers: Sequence[range], *, tied: bool) -> None:
        super().__init__()
        self.index, self.count, self.layers, self.tied = index, len(layers), layers[index], tied
        self.model, self.training = model, model.training

    @property
    def first(self) -> bool:
        """Whether it reads token ids."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it makes the loss."""
        return self.index == self.count - 1

    def forward(self, x: Tensor, *, call: Call) -> Tensor:
        """Hidden states (1, T, D) for the next stage; on the last one what `call.finish` makes."""
        inputs: dict[str, Any] = {"input_ids": x} if self.first else {"inputs_embeds": x}
        inputs |= {"position_ids": call.shard.position_ids[None], "shard": call.shard, "use_cache": False}
        inputs |= call.more
        if self.last:
            return call.finish(self.model, inputs)
        return self.model.base_model(**inputs).last_hidden_state


@dataclass(frozen=True)
class Parts:
    """Where a model's parts are, by name inside its base model: modules before the layers, the layers, those after."""

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]


def parts_of(model: PreTrainedModel) -> Parts:
    """The parts that the model's own pipeline plan names, or the usual three where it has none and they are there.

    Raises ModelError for a model that has neither, or that keeps parameters elsewhere in its base model.
    """
    base, name = model.base_model, type(model).__name__
    order: list[str] = [*(getattr(model.config, "base_model_pp_plan", None) or ("embed_tokens", "layers", "norm"))]
    lists = [part for part in order if isinstance(getattr(base, part, None), nn.ModuleList)]
    if base is model or len(lists) != 1 or any(not isinstance(getattr(base, part, None), nn.Module) for part in order):
        raise ModelError(
            f"{name} cannot be cut into pipeline stages: its pipeline plan names {', '.join(order)}, its base model "
            f"has {', '.join(n for n, _ in base.named_children())}; use pp 1"
        )
    at = order.index(lists[0])
    parts = Parts(tuple(order[:at]), lists[0], tuple(order[at + 1 :]))
    if beside := [n for n, _ in base.named_parameters() if n.partition(".")[0] not in order]:
        raise ModelError(
            f"{name} has parameters that its pipeline plan does not place ({', '.join(beside[:4])}); use pp 1"
        )
    return parts


def refuse_inexact(model: PreTrainedModel, parts: Parts) -> None:
    """Raise ModelError where stages, one after another, would not be the base model.

    With stand-ins for every part, each must be called once, in the order of the plan, on what the part before it
    returned and on nothing else that hidden states go into; and hidden states must come out bit by bit as they went in.
    Gemma's and Granite's forwards scale their embeddings there, which every stage would do again.
    """
    calls, unchanged = run_stand_ins(model, parts)
    name, order, found = type(model).__name__, _order(model, parts), [call.part for call in calls]
    if wrong := [part for part in order if found.count(part) != 1]:
        raise ModelError(
            f"{name} calls {wrong[0]} {found.count(wrong[0])} times in a forward pass from hidden states; pipeline "
            "stages call every part once: use pp 1"
        )
    if found != order:
        raise ModelError(f"{name} calls {', '.join(found)}; pipeline stages call {', '.join(order)}: use pp 1")
    if more := [call.part for call in calls if call.reads_more]:
        raise ModelError(
            f"{name} gives {more[0]} hidden states from before the part ahead of it, which a pipeline stage does not "
            "have: use pp 1"
        )
    if not unchanged:
        raise ModelError(
            f"{name} changes hidden states outside its embedding, layers and norm (it scales them, say), which every "
            "pipeline stage would repeat; use pp 1"
        )


def _order(model: PreTrainedModel, parts: Parts) -> list[str]:
    """The parts that hidden states go through, in order: not the embedding, which token ids go through."""
    base = model.base_model
    before = [part for part in parts.before if getattr(base, part) is not model.get_input_embeddings()]
    layers = [f"{parts.layers}.{i}" for i in range(len(getattr(base, parts.layers)))]
    return [*before, *layers, *parts.after]


class PartCall(NamedTuple):
    """A part was called; `reads_more`: with hidden states beside those that the call before it returned."""

    part: str
    reads_more: bool


def run_stand_ins(model: PreTrainedModel, parts: Parts) -> tuple[list[PartCall], bool]:
    """The calls of a base model's parts in one forward pass of two rows of hidden states, with stand-ins for all parts.

    And whether the hidden states came out bit by bit as they went in; on the meta device, in their shape.
    """
    bare, hidden = _copy(model, parts, range(0), first=False, last=False).base_model, model.config.get_text_config()
    device = next((buffer.device for buffer in bare.buffers()), torch.device("cpu"))  # of the rotary frequencies
    x = torch.linspace(-1, 1, 2 * hidden.hidden_size, device=device).view(1, 2, hidden.hidden_size).requires_grad_()
    returned, calls = [x], list[PartCall]()

    def note(part: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        calls.append(PartCall(part, _depend([args, kwargs], returned[:-1])))
        returned.append(out.detach().requires_grad_())
        return returned[-1]

    for name, module in bare.named_modules():
        if isinstance(module, Absent):
            module.register_forward_hook(partial(note, name), with_kwargs=True)
    with torch.enable_grad():
        out = bare(inputs_embeds=x, position_ids=torch.arange(2, device=device)[None], use_cache=False)[0]
        equal = out.shape == x.shape and (device.type == "meta" or torch.equal(out, x))
        return calls, equal and not _depend([out], returned[:-1])


def _depend(values: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether any tensor among values, however deep in tuples, lists and dictionaries, was made from one of these."""
    made = [leaf.sum() for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not made or not tensors:
        return False
    gradients = torch.autograd.grad(made, tensors, retain_graph=True, allow_unused=True)
    return any(gradient is not None for gradient in gradients)


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the embedding and the head are one parameter."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def cut(model: PreTrainedModel, parts: Parts, layers: Sequence[range], mine: Sequence[int]) -> tuple[Stage, ...]:
    """This rank's stages of a model, whose other modules are freed: afterwards the model itself is of no use.

    The first and the last stage both hold the embedding and the head where they are tied, each a parameter of its own.
    """
    tied, last = is_tied(model), len(layers) - 1
    stages: list[Stage] = []
    for index in mine:
        part = _copy(model, parts, layers[index], first=index == 0, last=index == last)
        if tied and index == last and 0 in mine:
            _untie_from_first(part)
        stages.append(Stage(part, index, layers, tied=tied))
    kept = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.new_empty(0)
    return tuple(stages)


def _copy(model: PreTrainedModel, parts: Parts, layers: range, *, first: bool, last: bool) -> PreTrainedModel:
    """The model with stand-ins for what this stage does not hold; modules without parameters are copied."""
    tied = is_tied(model)
    whole = _shallow(model)
    base = _shallow(model.base_model)
    whole._modules[model.base_model_prefix] = base
    held = dict.fromkeys(parts.before, first or (tied and last)) | dict.fromkeys(parts.after, last)
    for name, module in base.named_children():
        if name == parts.layers:
            base._modules[name] = _some_layers(module, layers)
        elif name in held:
            base._modules[name] = module if held[name] else Absent()
        else:
            base._modules[name] = copy.deepcopy(module)  # rotary embeddings: buffers alone
    if not (last or (tied and first)):
        for name, _ in list(model.named_children()):
            if name != model.base_model_prefix:
                whole._modules[name] = Absent()
    return whole


def _some_layers(layers: nn.Module, held: range) -> nn.ModuleList:
    some = _shallow(layers)
    assert isinstance(some, nn.ModuleList)
    for i, name in enumerate(layers._modules):
        if i not in held:
            some._modules[name] = Absent()
    return some


def _shallow(module: Any) -> Any:
    """A module of its own with the same children: what is put in a child's place is not put into the original."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, dict):
            twin.__dict__[name] = copy.copy(value)
    twin.__dict__.pop("forward", None)  # a forward of the instance is bound to the original
    return twin


def _untie_from_first(model: PreTrainedModel) -> None:
    """Give a last stage that shares its rank with the first one an embedding and a head of its own, tied."""
    embedding, head = _shallow(model.get_input_embeddings()), _shallow(model.get_output_embeddings())
    weight = embedding.weight
    embedding.weight = head.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)

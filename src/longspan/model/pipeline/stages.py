"""Stages of a pipeline: a model's own forward over the decoder layers of one stage.

A stage is a copy of the model that shares the modules of its layers and has stand-ins for all others: its forward is
the architecture's own, so that masks, rotary embeddings, windows and soft caps are whatever they are there, and every
layer keeps its global index and name. Where the embedding, the layers and the norm are is read from the model's
pipeline plan (`config.base_model_pp_plan`, module to names of inputs and outputs). Schedules are in `schedules.py`.

Some layers read the embedding too, as Zamba 2's do: it travels through the pipeline with the hidden states. On a later
stage, a base model's forward takes the hidden states for embeddings and hands them to its layers as such, so a hook on
every layer replaces that argument by the true embedding; on the first stage the hook reads the embedding from it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.layers import decoder_model, text_name
from longspan.model.parts import ModelParts, PartCall, copy_for_stage, trace_parts
from longspan.model.pipeline.copies import (
    SharedParameter,
    refuse_partly_shared,
    separate_copies,
    shared_parameters,
)
from longspan.model.seams.attention_calls import Probe
from longspan.model.seams.meta_pass import run_on_meta
from longspan.model.seams.refusals import find_set_forwards

KEYWORD = "longspan_embedding"  # layers' keyword argument: rows of the embedding, or a TakenEmbedding to fill


class TakenEmbedding:
    """A holder for the embedding (1, T, D), which the first stage's layers fill with what they were given."""

    rows: Tensor | None = None


def embedding_argument(calls: Sequence[PartCall], layers: str) -> int | str | None:
    """Return the argument, by position or name, in which layers get the embedding unchanged; None if there is none.

    Also None if another part than layers gets it, if layers get it in different arguments, or if they do not get
    keyword arguments, by which the embedding is passed to the hook.
    """
    readers = [call for call in calls if call.reads_more]
    only_layers_read = all(call.part.startswith(f"{layers}.") and "shard" in call.keywords for call in readers)
    arguments = {call.first_again for call in readers}
    return arguments.pop() if only_layers_read and len(arguments) == 1 else None


def hook_embedding(layer: nn.Module, argument: int | str) -> None:
    """Hook a layer, which from here on must be called with `KEYWORD`: see `_pass_embedding`."""
    layer.register_forward_pre_hook(partial(_pass_embedding, argument), with_kwargs=True)


def _pass_embedding(argument: int | str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put `argument` into the `TakenEmbedding` on the first stage; on others replace it by the embedding."""
    kwargs = dict(kwargs)
    embedding = kwargs.pop(KEYWORD)
    arguments: Any = kwargs if isinstance(argument, str) else [*args]
    if isinstance(embedding, TakenEmbedding):
        embedding.rows = arguments[argument]
    else:
        arguments[argument] = embedding
    return (args, kwargs) if isinstance(argument, str) else (tuple(arguments), kwargs)


MakeOutput = Callable[[nn.Module, Mapping[str, Any]], Tensor]


class StageInput:
    """What a stage needs besides its input: token ids (1, T) for the first, `make_output` for the last.

    A plain class, as SequenceShard is: FSDP2 and torch's schedules take dataclasses apart and rebuild them.

    `make_output(model, arguments)` calls the model and makes the last stage's output from it, in training the loss (a
    scalar). `keywords` goes to every stage's layers, as `shard` does.
    """

    __slots__ = ("ids", "keywords", "make_output", "shard")

    def __init__(
        self, shard: SequenceShard, ids: Tensor, make_output: MakeOutput, keywords: Mapping[str, Any] | None = None
    ) -> None:
        self.shard: SequenceShard = shard
        self.ids: Tensor = ids
        self.make_output: MakeOutput = make_output
        self.keywords: Mapping[str, Any] = keywords or {}


class Stage(nn.Module):
    """One stage of a model: from token ids, or hidden states (1, T, D) of the stage before, to its last layer's states.

    It is stage `index` of `count`, in model order; `layers` are global indices. `model` is the copy with stand-ins.
    `shared` are the parameters that several stages have. `with_embedding`: layers read the embedding too, which is
    joined behind the hidden states from stage to stage, (1, 2T, D).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        index: int,
        layers: Sequence[range],
        shared: tuple[SharedParameter, ...] = (),
        *,
        with_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.index: int = index
        self.count: int = len(layers)
        self.layers: range = layers[index]
        self.shared: tuple[SharedParameter, ...] = shared
        self.layers_of_stages: tuple[range, ...] = tuple(layers)
        self.with_embedding: bool = with_embedding
        self.model: PreTrainedModel = model
        self.training: bool = model.training  # nn.Module would begin in training mode

    @property
    def first(self) -> bool:
        """Whether the stage reads token ids."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the stage makes the loss."""
        return self.index == self.count - 1

    def forward(self, x: Tensor, *, stage_input: StageInput) -> Tensor:
        """Compute hidden states for the next stage; the last stage returns what `stage_input.make_output` makes.

        With the embedding, x on later stages and the result are (1, 2T, D): hidden states, then the embedding.
        """
        embedding: Tensor | TakenEmbedding = TakenEmbedding()
        if self.with_embedding and not self.first:
            x, embedding = x.chunk(2, dim=1)
        inputs: dict[str, Any] = {"input_ids": x} if self.first else {"inputs_embeds": x}
        inputs |= {KEYWORD: embedding} if self.with_embedding else {}
        inputs |= {"position_ids": stage_input.shard.position_ids[None], "shard": stage_input.shard, "use_cache": False}
        inputs |= stage_input.keywords
        if self.last:
            return stage_input.make_output(self.model, inputs)
        hidden = decoder_model(self.model)(**inputs).last_hidden_state
        if not self.with_embedding:
            return hidden
        # On the first stage the hook of its layers has put the embedding's rows into `TakenEmbedding`.
        rows = embedding.rows if isinstance(embedding, TakenEmbedding) else embedding
        assert rows is not None
        return torch.cat([hidden, rows], dim=1)


def refuse_inexact(model: PreTrainedModel, parts: ModelParts) -> None:
    """Raise ModelError where stages, one after another, would not compute what the base model does.

    The model is run with stand-ins that return their input. Each part must be called once, in the order of the plan, on
    what the part before it returned; no part may read earlier hidden states, except layers that read the embedding
    unchanged; and hidden states must come out bit by bit as they went in. Scaling of the embedding, as in Granite and
    Gemma, does no harm: it happens before the first part, and only on the first stage.
    """
    _refuse_set_forwards(model)
    calls, unchanged = trace_parts(model, parts, shard=Probe())
    name, order, called = type(model).__name__, _order_parts(model, parts), [call.part for call in calls]
    if wrong := [part for part in order if called.count(part) != 1]:
        raise ModelError(
            f"{name} calls {wrong[0]} {called.count(wrong[0])} times in a forward pass from hidden states; pipeline "
            "stages call every part once: use pp 1"
        )
    if called != order:
        raise ModelError(f"{name} calls {', '.join(called)}; pipeline stages call {', '.join(order)}: use pp 1")
    readers = [call.part for call in calls if call.reads_more]
    if readers and embedding_argument(calls, parts.layers) is None:
        raise ModelError(
            f"{name} gives {readers[0]} hidden states from before the part ahead of it, which a pipeline stage does "
            "not have: use pp 1"
        )
    if not unchanged:
        raise ModelError(
            f"{name} changes hidden states between its layers or after them, outside its norm (it scales them, say), "
            "which every pipeline stage would repeat; use pp 1"
        )


def _refuse_set_forwards(model: PreTrainedModel) -> None:
    path = text_name(model).split(".")
    around = [".".join(path[: i + 1]) for i in range(len(path))]
    if names := find_set_forwards((name, model.get_submodule(name)) for name in around):
        raise ModelError(
            f"{type(model).__name__}: {', '.join(names)} has a forward set on the instance (module.forward = …), which "
            "copies of it in pipeline stages would leave out; define it in a subclass, or use pp 1"
        )


def refuse_dependent_layers(model: PreTrainedModel, parts: ModelParts, layers: Sequence[range]) -> None:
    """Raise ModelError where a stage's layers need more of earlier layers than their hidden states.

    Gemma 4's last layers attend to keys and values of earlier ones. `layers` are the layers of each stage. All layers
    run on the meta device first, then each stage alone; if all layers together do not run there, no stage is tried.
    """
    hidden = torch.zeros(1, 2, model.config.get_text_config().hidden_size, device="meta")
    for indices in (range(sum(map(len, layers))), *layers):
        stage = decoder_model(copy_for_stage(model, parts, indices, first=False, last=False))
        try:
            run_on_meta(stage, Probe(), input_ids=None, inputs_embeds=hidden)
        except Exception as error:  # whatever a forward raises
            if indices not in layers:
                return
            raise ModelError(
                f"{type(model).__name__}: layers {indices.start} to {indices.stop - 1} do not run without those before "
                f"them ({type(error).__name__}: {error}), as a pipeline stage would; use pp 1"
            ) from error


def _order_parts(model: PreTrainedModel, parts: ModelParts) -> list[str]:
    base = decoder_model(model)
    parts_before = [part for part in parts.before if getattr(base, part) is not model.get_input_embeddings()]
    layers = [f"{parts.layers}.{i}" for i in range(len(getattr(base, parts.layers)))]
    return [*parts_before, *layers, *parts.after]


def stage_models(model: PreTrainedModel, parts: ModelParts, layers: Sequence[range]) -> list[PreTrainedModel]:
    """Copy the model once for each stage, with the model's own modules, and stand-ins for other stages' modules."""
    last = len(layers) - 1
    return [copy_for_stage(model, parts, indices, first=i == 0, last=i == last) for i, indices in enumerate(layers)]


def cut_model(
    model: PreTrainedModel, parts: ModelParts, layers: Sequence[range], local_stages: Sequence[int]
) -> tuple[Stage, ...]:
    """Cut a model into this rank's stages; other parameters are freed, and the model itself is of no use afterwards.

    Each stage has its own copy of a parameter that several stages have. Raises ModelError, before anything is changed,
    for a module that shares some of its parameters, and not all, with another stage.
    """
    argument = embedding_argument(trace_parts(model, parts, shard=Probe())[0], parts.layers)
    models = stage_models(model, parts, layers)
    refuse_partly_shared(model, models)
    shared = shared_parameters(model, models)
    separate_copies([models[index] for index in local_stages])
    stages = tuple(Stage(models[i], i, layers, shared, with_embedding=argument is not None) for i in local_stages)
    for layer in [getattr(decoder_model(stage.model), parts.layers)[i] for stage in stages for i in stage.layers]:
        if argument is not None:
            hook_embedding(layer, argument)
    ids_here = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in ids_here:
            parameter.data = parameter.data.new_empty(0)
    return stages

"""Stages of a pipeline: the model's own forward over the layers of one stage, with stand-ins for all other modules.

What several stages have, a tied embedding or Zamba 2's blocks, is a copy on each: once a step every holder gets the sum
of all copies' gradients, added in one order, so that the copies stay bit-equal. Layers that read the embedding get it
through the pipeline, by a hook that puts it in place of the argument.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm import SequenceShard, World
from longspan.comm.channel import sum_parts
from longspan.errors import ModelError
from longspan.model.layers import decoder_model, text_model_name
from longspan.model.parts import ModelParts, PartCall, copy_for_stage, trace_parts
from longspan.model.seams.meta_pass import run_on_meta
from longspan.model.seams.set_forwards import modules_with_instance_forward
from longspan.model.seams.trial_shards import Probe
from longspan.model.weights.gradients import set_earlier_gradients_aside
from longspan.model.weights.local_tensors import local_tensor


class SharedParameter(NamedTuple):
    """A parameter of several stages: its names in the whole model, in the model's order, and the stages' indices."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


def shared_parameters(model: PreTrainedModel, stages: Sequence[nn.Module]) -> tuple[SharedParameter, ...]:
    """Return the parameters that several stages have, in the model's order; `stages` are all of the whole model's."""
    names = defaultdict[int, list[str]](list)
    holders = defaultdict[int, list[int]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            holders[id(parameter)].append(index)
    return tuple(SharedParameter(tuple(names[key]), tuple(holders[key])) for key in names if len(holders[key]) > 1)


def refuse_parameter_copies(
    model: PreTrainedModel, stages: Sequence[nn.Module], shared: Sequence[SharedParameter], pp: int
) -> None:
    """Raise ModelError where one rank would have two copies of a parameter, or a module shares only some of its
    parameters with one of another stage.

    A module that holds a copy is registered whole, under the module's first name in the whole model: all of its
    parameters must be copies from there. `shared` are what several of all the `stages` have.
    """
    class_name = type(model).__name__
    for entry in shared:
        if len({stage % pp for stage in entry.stages}) < len(entry.stages):
            raise ModelError(
                f"{class_name}: {entry.names[0]} is on the pipeline stages {', '.join(map(str, entry.stages))} of "
                f"{len(stages)}, of which a rank of pp {pp} has several; use virtual_stages 1 (vpp = 1)"
            )
    first_names = {name: entry.names[0] for entry in shared for name in entry.names}
    for stage in stages:
        names_here = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
        # Copies that this stage has under a later name alone; the module around each is one of another stage's.
        for later_name in sorted(n for n in names_here & first_names.keys() if first_names[n] not in names_here):
            path = later_name.rpartition(".")[0]
            first_path = first_names[later_name].rpartition(".")[0]
            names_in_module = [
                inner_name for inner_name, _ in stage.get_submodule(path).named_parameters(remove_duplicate=False)
            ]
            if separate := [n for n in names_in_module if first_names.get(f"{path}.{n}") != f"{first_path}.{n}"]:
                raise ModelError(
                    f"{class_name}: {later_name} is {first_names[later_name]} of another pipeline stage, and "
                    f"{path}.{separate[0]} is a parameter of its own; share whole modules, give each stage its own, or "
                    "use pp 1"
                )


class _ParameterPlace(NamedTuple):
    """Where a parameter is: its module and its name there. FSDP2 replaces parameters, and keeps modules."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.module, self.name)


class StageCopies:
    """This rank's copies of parameters that stages of several ranks have, of which each rank trains its own."""

    def __init__(
        self, shared: Sequence[SharedParameter], models: Mapping[int, PreTrainedModel], pp: int, position: int
    ) -> None:
        """Find this rank's copies: `models` are its stages, by index; stage s is at pipeline position s % `pp`.

        The gradient norm counts a parameter where the first of its stages is.
        """
        self._holders = [sorted(stage % pp for stage in entry.stages) for entry in shared]  # pipeline ranks
        self._counted_here = [entry.stages[0] % pp == position for entry in shared]
        # The place is None if no stage here has the parameter.
        self._places: list[_ParameterPlace | None] = []
        # modules here with copies of another stage's parameters, by the name of that stage's module
        self.modules_of_other_stages: dict[str, nn.Module] = {}
        for entry in shared:
            model = next((model for index, model in models.items() if index in entry.stages), None)
            if model is None:
                self._places.append(None)
                continue
            names_here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            path, _, attribute = next(name for name in entry.names if name in names_here).rpartition(".")
            self._places.append(_ParameterPlace(model.get_submodule(path), attribute))
            if entry.names[0] not in names_here:
                self.modules_of_other_stages[entry.names[0].rpartition(".")[0]] = model.get_submodule(path)

    @property
    def parameters_counted_elsewhere(self) -> set[nn.Parameter]:
        """This rank's copies that another rank, with an earlier stage, counts in the gradient norm."""
        pairs = zip(self._places, self._counted_here, strict=True)
        return {place.parameter for place, counted_here in pairs if place is not None and not counted_here}

    @contextmanager
    def sum_copied_gradients(self, world: World) -> Iterator[None]:
        """Sum over all copies, at the end, what backward passes inside added to gradients; all ranks enter.

        They first count who has a gradient of each parameter: if any has one, all holders exchange theirs; if none
        has, it stays without.
        """
        copies = [place.parameter for place in self._places if place is not None]
        with set_earlier_gradients_aside([copy for copy in copies if copy.requires_grad]):
            yield
            if not self._places:
                return
            has_gradient = [float(place is not None and place.parameter.grad is not None) for place in self._places]
            gradient_counts = world.control.sum_over_ranks(has_gradient, "count of gradients that stages share")
            for place, holders, count in zip(self._places, self._holders, gradient_counts, strict=True):
                if place is not None and count:
                    _sum_copies_of_gradient(place.parameter, holders, world)


@torch.no_grad()
def _sum_copies_of_gradient(parameter: nn.Parameter, holders: Sequence[int], world: World) -> None:
    """The pipeline ranks `holders` enter together. Each adds up one slice of all gradients, in the order of
    positions, and sends the sum to the others, so that all get equal bits."""
    pipeline = world.channels.pipeline
    # The stage made no use of the parameter in this step.
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = local_tensor(parameter.grad)
    total = gradient.contiguous()
    label = "sum of gradients that stages share"
    slices = dict(zip(holders, total.view(-1).tensor_split(len(holders)), strict=True))  # views, which get the sums
    local_slice = slices.pop(pipeline.index)
    parts = {
        holder: local_slice if holder == pipeline.index else torch.empty_like(local_slice) for holder in holders
    }
    pipeline.exchange([*slices.items()], [(holder, parts[holder]) for holder in slices], label).wait()
    local_slice.copy_(sum_parts([*parts.values()]))
    pipeline.exchange([(holder, local_slice) for holder in slices], [*slices.items()], label).wait()
    gradient.copy_(total)


EMBEDDING_KEYWORD = (
    "longspan_embedding"  # layers' keyword argument: rows of the embedding, or a TakenEmbedding to fill
)


class TakenEmbedding:
    """A holder for the embedding (1, T, D), which the first stage's layers fill with what they were given."""

    rows: Tensor | None = None


def embedding_argument(calls: Sequence[PartCall], layers: str) -> int | str | None:
    """Return the position or keyword at which layers get the embedding unchanged.

    None if no part reads it, a part that is no layer does, or layers get it in different arguments. `layers` is the
    name of the list of layers, `calls` are those of `trace_parts`.
    """
    readers = [call for call in calls if call.reads_more]
    only_layers_read = all(call.part.startswith(f"{layers}.") and "shard" in call.keywords for call in readers)
    arguments = {call.first_again for call in readers}
    return arguments.pop() if only_layers_read and len(arguments) == 1 else None


def _pass_embedding(argument: int | str, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """On the first stage the embedding is kept in the `TakenEmbedding`; on others it replaces the argument."""
    kwargs = dict(kwargs)
    embedding = kwargs.pop(EMBEDDING_KEYWORD)
    arguments: Any = kwargs if isinstance(argument, str) else [*args]
    if isinstance(embedding, TakenEmbedding):
        embedding.rows = arguments[argument]
    else:
        arguments[argument] = embedding
    return (args, kwargs) if isinstance(argument, str) else (tuple(arguments), kwargs)


# (a stage's model, the arguments of its forward) -> what the last stage returns
MakeOutput = Callable[[nn.Module, Mapping[str, Any]], Tensor]


class StageInput:
    """What a stage needs besides its input: token ids (1, T) for the first, `make_output` for the last.

    A plain class: FSDP2 and torch's schedules rebuild dataclasses. `make_output(model, arguments)` makes the loss, a
    scalar, in training; `keywords` go to every stage's layers.
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

    `layers` are global indices, `shared` what several stages have. `with_embedding`: layers read the embedding too,
    which is joined behind the hidden states, (1, 2T, D).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        index: int,
        layers: Sequence[range],
        shared: tuple[SharedParameter, ...],
        *,
        with_embedding: bool,
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
        """Compute hidden states for the next stage; the last stage returns what `stage_input.make_output` makes."""
        embedding: Tensor | TakenEmbedding = TakenEmbedding()
        if self.with_embedding and not self.first:
            x, embedding = x.chunk(2, dim=1)
        inputs: dict[str, Any] = {"input_ids": x} if self.first else {"inputs_embeds": x}
        inputs |= {EMBEDDING_KEYWORD: embedding} if self.with_embedding else {}
        inputs |= {
            "position_ids": stage_input.shard.position_ids[None],
            "shard": stage_input.shard,
            "use_cache": False,
        }
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


def refuse_inexact_stages(model: PreTrainedModel, parts: ModelParts) -> None:
    """Raise ModelError where stages, one after another, would not compute what the base model does.

    The base model's forward runs with stand-ins for its parts. It must call each part once, in order, with what the
    part before returned; layers may also get the embedding, unchanged. It must return what the last part returned. What
    it does to the embedding before the first part, such as scaling, stays on the first stage. No forward may be set on
    an instance around the layers.
    """
    path = text_model_name(model).split(".")
    wrapper_names = [".".join(path[: i + 1]) for i in range(len(path))]
    if names := modules_with_instance_forward((name, model.get_submodule(name)) for name in wrapper_names):
        raise ModelError(
            f"{type(model).__name__}: {', '.join(names)} has a forward set on the instance (module.forward = …), which "
            "copies of it in pipeline stages would leave out; define it in a subclass, or use pp 1"
        )
    calls, unchanged = trace_parts(model, parts, shard=Probe())
    name = type(model).__name__
    base = decoder_model(model)
    called = [call.part for call in calls]
    # Without the embedding: the trace begins with hidden states in its place.
    before = [part for part in parts.before if getattr(base, part) is not model.get_input_embeddings()]
    order = [*before, *(f"{parts.layers}.{i}" for i in range(len(getattr(base, parts.layers)))), *parts.after]
    if miscalled := [part for part in order if called.count(part) != 1]:
        raise ModelError(
            f"{name} calls {miscalled[0]} {called.count(miscalled[0])} times in a forward pass from hidden states; "
            "pipeline stages call every part once: use pp 1"
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


def refuse_dependent_layers(model: PreTrainedModel, parts: ModelParts, layers: Sequence[range]) -> None:
    """Raise ModelError where a stage's layers need more of earlier layers than their hidden states, as Gemma 4's do.

    All layers run together on the meta device, then those of each stage; where all together do not run, nothing is
    refused.
    """
    hidden = torch.zeros(1, 2, model.config.get_text_config().hidden_size, device="meta")

    def run_alone(indices: range) -> Exception | None:
        """Run these layers on the meta device, from hidden states; returns their error, None if they run."""
        stage = decoder_model(copy_for_stage(model, parts, indices, first=False, last=False))
        try:
            run_on_meta(stage, Probe(), input_ids=None, inputs_embeds=hidden)
        except Exception as error:  # whatever a forward raises
            return error
        return None

    count = sum(map(len, layers))
    if run_alone(range(count)) is not None:
        return
    for indices in layers:
        if (error := run_alone(indices)) is not None:
            first = ", ".join(str(i) for i in range(1, count) if run_alone(range(i, count)) is None)
            hint = f"later stages may begin with layers {first}: choose pp and vpp by that, or " if first else ""
            raise ModelError(
                f"{type(model).__name__}: layers {indices.start} to {indices.stop - 1} do not run without those before "
                f"them ({type(error).__name__}: {error}), as a pipeline stage would; {hint}use pp 1"
            ) from error


def make_stage_models(model: PreTrainedModel, parts: ModelParts, layers: Sequence[range]) -> list[PreTrainedModel]:
    """Copy the model for each stage, as `copy_for_stage` does; `layers` are the indices of each stage's layers."""
    last = len(layers) - 1
    return [copy_for_stage(model, parts, indices, first=i == 0, last=i == last) for i, indices in enumerate(layers)]


def cut_stages_of_position(
    model: PreTrainedModel, parts: ModelParts, layers: Sequence[range], pp: int, position: int
) -> tuple[Stage, ...]:
    """Cut a model into the stages of one pipeline position, every pp-th; all its other parameters are emptied.

    `layers` are the indices of the layers of all stages. ModelError for copies of parameters that would not be exact.
    """
    argument = embedding_argument(trace_parts(model, parts, shard=Probe())[0], parts.layers)
    models = make_stage_models(model, parts, layers)
    shared = shared_parameters(model, models)
    refuse_parameter_copies(model, models, shared, pp)
    local_indices = range(position, len(models), pp)
    stages = tuple(Stage(models[i], i, layers, shared, with_embedding=argument is not None) for i in local_indices)
    if argument is not None:
        for stage in stages:
            all_layers = getattr(decoder_model(stage.model), parts.layers)
            for i in stage.layers:
                all_layers[i].register_forward_pre_hook(partial(_pass_embedding, argument), with_kwargs=True)
    ids_here = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in ids_here:
            parameter.data = parameter.data.new_empty(0)
    return stages

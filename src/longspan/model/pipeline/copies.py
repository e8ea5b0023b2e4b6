"""Parameters that several stages of a pipeline have: each stage holds a copy of its own, and all are kept bit-equal.

An embedding that the head is tied to, or that multi-token prediction needs, is on the first and on the last stage;
Zamba 2's blocks of attention and an MLP are on every stage with a layer that calls them.

Once a step, before the gradient norm and the optimizer, every rank that has a copy gets the sum of all copies'
gradients, added in the order of the pipeline's ranks; each rank adds up one slice. The optimizer, which sees one copy
on each rank, then does the same to each. Where a rank holds several stages, the copy of its first stage is trained, and
the others are made equal to it before every pass.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.channel import sum_parts
from longspan.errors import ModelError
from longspan.model.layers import shallow_module
from longspan.model.weights.local_tensors import add_gradient, local_tensor, set_earlier_gradients_aside


class SharedParameter(NamedTuple):
    """A parameter that several stages have: its names in the whole model, in the model's order, and their indices."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


def shared_parameters(model: PreTrainedModel, stages: Sequence[nn.Module]) -> tuple[SharedParameter, ...]:
    """Return the parameters of a whole model that several of its stages have, in the model's order.

    `stages` are all stages, made of the model's own parameters and not of copies.
    """
    names, holders = defaultdict[int, list[str]](list), defaultdict[int, list[int]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for index, stage in enumerate(stages):
        for parameter in stage.parameters():
            holders[id(parameter)].append(index)
    return tuple(SharedParameter(tuple(names[key]), tuple(holders[key])) for key in names if len(holders[key]) > 1)


def refuse_partly_shared(model: PreTrainedModel, stages: Sequence[nn.Module]) -> None:
    """Raise ModelError where a module shares a parameter with another stage, and has further parameters of its own.

    A shared parameter is registered with its whole module, under the first name in the whole model: a parameter of its
    own would get another one's name. Parameters that have one name in all stages, such as the embedding's, are allowed.
    """
    shared = shared_parameters(model, stages)
    first_name = {name: entry.names[0] for entry in shared for name in entry.names}
    for stage in stages:
        names_here = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
        for name in sorted(name for name in names_here & first_name.keys() if first_name[name] not in names_here):
            path, origin = name.rpartition(".")[0], first_name[name].rpartition(".")[0]
            names = [inside for inside, _ in stage.get_submodule(path).named_parameters(remove_duplicate=False)]
            if separate := [n for n in names if first_name.get(f"{path}.{n}") != f"{origin}.{n}"]:
                raise ModelError(
                    f"{type(model).__name__}: {name} is {first_name[name]} of another pipeline stage, and "
                    f"{path}.{separate[0]} is a parameter of its own; share whole modules, give each stage its own, or "
                    "use pp 1"
                )


def separate_copies(stages: Sequence[nn.Module]) -> None:
    """Give each stage of one rank its own copies of parameters that an earlier of these stages has too."""
    earlier_modules, earlier_parameters = set[nn.Module](), set[nn.Parameter]()
    for stage in stages:
        replacements = {
            p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in stage.parameters() if p in earlier_parameters
        }
        if replacements:
            _replace_parameters(stage, replacements, earlier_modules, {})
        earlier_modules.update(stage.modules())
        earlier_parameters.update(stage.parameters())


def _replace_parameters(
    module: nn.Module,
    replacements: Mapping[nn.Parameter, nn.Parameter],
    elsewhere: Set[nn.Module],
    twins: dict[nn.Module, nn.Module],
) -> None:
    """A child that is in an earlier stage too (`elsewhere`) is first replaced by a shallow copy, so that the earlier
    stage keeps its parameters; `twins` collects these copies, one for each module.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = replacements.get(parameter, parameter)
    for name, child in module._modules.items():
        if child is None or not any(parameter in replacements for parameter in child.parameters()):
            continue
        if child in elsewhere:
            child = module._modules[name] = twins.setdefault(child, shallow_module(child))
        _replace_parameters(child, replacements, elsewhere, twins)


class _Place(NamedTuple):
    """A parameter as its module and its name there, because FSDP2 replaces parameters and keeps modules."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.module, self.name)


class StageCopies:
    """This rank's copies of the parameters that several stages have.

    One copy of each parameter on a rank is trained, that of its first stage here; the others follow it.
    """

    def __init__(
        self,
        shared: Sequence[SharedParameter],
        models: Mapping[int, PreTrainedModel],
        positions: Sequence[int],
        position: int,
    ) -> None:
        """Find shared parameters in the stages of this rank, and which copy of each is trained.

        `models` are the stages here by index, `positions` the pipeline position of every stage, `position` that of this
        rank. The gradient norm counts a parameter on the ranks that hold the first of its stages.
        """
        self._shared, self._position = tuple(shared), position
        self._holders = [sorted({positions[stage] for stage in entry.stages}) for entry in shared]  # pipeline ranks
        self._counted = [positions[entry.stages[0]] for entry in shared]
        # the names of all parameters of each stage here, tied ones under each of their names
        names = {i: {n for n, _ in model.named_parameters(remove_duplicate=False)} for i, model in models.items()}
        self._places: list[list[_Place]] = []  # of each parameter, one for each stage here that has it
        self.first_names: dict[str, nn.Module] = {}  # what is here of modules that belong to other stages, by name
        self.trained: dict[nn.Module, nn.Module] = {}  # modules of later stages here, and whose parameters are trained
        for entry in shared:
            copies = [(models[i], [n for n in entry.names if n in names[i]]) for i in models if i in entry.stages]
            self._places.append([_find_place(model, names_there[0]) for model, names_there in copies])
            self._note_modules(entry.names[0], copies)

    def _note_modules(self, first_name: str, copies: Sequence[tuple[PreTrainedModel, list[str]]]) -> None:
        """Note which module of this rank has the trained copy of a parameter.

        `copies` are this rank's stages that have the parameter, the trained one first, with its names there. The module
        is noted for the parameter's first name in the whole model, if that belongs to another rank's stage, and for the
        modules of the other copies.
        """
        if not copies:  # no stage here has the parameter
            return
        trained_model, trained_names = copies[0]
        trained = _find_place(trained_model, trained_names[0]).module
        if first_name not in trained_names:
            self.first_names[first_name.rpartition(".")[0]] = trained
        for model, names in copies[1:]:
            self.trained |= {_find_place(model, name).module: trained for name in names}

    def of(self, name: str) -> list[nn.Parameter]:
        """Return this rank's copies of a parameter, by any of its names in the whole model, earlier stages first."""
        places = (places for entry, places in zip(self._shared, self._places, strict=True) if name in entry.names)
        return [place.parameter for place in next(places, ())]

    @property
    def parameters_counted_elsewhere(self) -> set[nn.Parameter]:
        """This rank's trained copies that another rank, with an earlier stage, counts in the gradient norm."""
        pairs = zip(self._places, self._counted, strict=True)
        return {places[0].parameter for places, counted in pairs if places and counted != self._position}

    @torch.no_grad()
    def make_copies_equal(self) -> None:
        """Set all copies of this rank to the values of the first, which is trained."""
        for trained_place, *copied_places in filter(None, self._places):
            for copied_place in copied_places:
                local_tensor(copied_place.parameter).copy_(local_tensor(trained_place.parameter))

    @contextmanager
    def sum_copied_gradients(self, world: World) -> Iterator[None]:
        """Sum over all copies, at the end of the `with` block, what backward passes inside added to their gradients.

        The copies of one rank are added to its trained one; then the ranks that hold the parameter sum these. All ranks
        of the home enter, and first count who has a gradient: if any rank has one all holders exchange, and if none
        has, the parameter keeps no gradient.
        """
        copies = [place.parameter for places in self._places for place in places if place.parameter.requires_grad]
        with set_earlier_gradients_aside(copies):
            yield
            if not self._shared:
                return
            for trained_place, *copied_places in filter(None, self._places):
                for copied_place in copied_places:
                    add_gradient(trained_place.parameter, copied_place.parameter.grad)
                    copied_place.parameter.grad = None
            has_gradient = [float(bool(places) and places[0].parameter.grad is not None) for places in self._places]
            used = world.control.sum_over_ranks(has_gradient, "count of gradients that stages share")
            for places, holders, count in zip(self._places, self._holders, used, strict=True):
                if places and count and len(holders) > 1:
                    _sum_gradient(places[0].parameter, holders, world)


def _find_place(model: nn.Module, name: str) -> _Place:
    path, _, attribute = name.rpartition(".")
    return _Place(model.get_submodule(path), attribute)


@torch.no_grad()
def _sum_gradient(parameter: nn.Parameter, holders: Sequence[int], world: World) -> None:
    """Each holder gets one slice from all others, adds them in the order of positions, so that all get the same bits,
    and sends the sum back.
    """
    pipeline = world.channels.pipeline
    if parameter.grad is None:  # of a stage that made no use of it in this step
        parameter.grad = torch.zeros_like(parameter)
    gradient = local_tensor(parameter.grad)
    total, label = gradient.contiguous(), "sum of gradients that stages share"
    slices = dict(zip(holders, total.view(-1).tensor_split(len(holders)), strict=True))  # views, which get the sums
    local_slice = slices.pop(pipeline.index)
    parts = {holder: local_slice if holder == pipeline.index else torch.empty_like(local_slice) for holder in holders}
    pipeline.exchange([*slices.items()], [(holder, parts[holder]) for holder in slices], label).wait()
    local_slice.copy_(sum_parts([*parts.values()]))
    pipeline.exchange([(holder, local_slice) for holder in slices], [*slices.items()], label).wait()
    gradient.copy_(total)

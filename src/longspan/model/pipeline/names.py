"""What a rank's stages hold, under the names of the whole model."""

from torch import nn
from transformers import PreTrainedModel

from longspan.model.layers import Absent, decoder_of, text_name
from longspan.model.parts import parts_of
from longspan.model.pipeline.copies import StageCopies
from longspan.model.pipeline.stages import Stage


def name_as_in_whole(into: nn.Module, models: list[PreTrainedModel], copies: StageCopies) -> None:
    """Give `into` the modules of a rank's stages as children, by their names in the whole model.

    Of parameters that several stages have it gets the copy that is trained, under each name that the stages know and
    under the first that the parameter has in the whole model: by that one optimizers and checkpoints know it.
    """
    for name, module in copies.first_names.items():
        *around, last = name.split(".")
        node = into
        for part in around:
            node = _child(node, part)
        node.add_module(last, module)
    for model in models:
        _graft(into, model, _around_layers(model), copies)


def unnamed_modules(stage: Stage, copies: StageCopies) -> list[tuple[str, nn.Module]]:
    """The modules of a stage that the whole model's names do not lead to: those around layers and around copies.

    Not those whose own parameters are copies that are not trained.
    """
    around = {stage, *_around_layers(stage.model), stage.model}
    return [(n, m) for n, m in stage.named_modules() if m in around or _is_around_copies(m, copies)]


def _is_around_copies(module: nn.Module, copies: StageCopies) -> bool:
    return module not in copies.trained and any(inside in copies.trained for inside in module.modules())


def _graft(into: nn.Module, source: nn.Module, around: set[nn.Module], copies: StageCopies) -> None:
    """Put the children of a stage's module into one of the whole; what an earlier stage of the rank holds stays."""
    for name, child in source.named_children():
        if child in around or _is_around_copies(child, copies):
            _graft(_child(into, name), child, around, copies)
        elif not isinstance(child, Absent) and name not in into._modules:
            into.add_module(name, copies.trained.get(child, child))


def _child(node: nn.Module, name: str) -> nn.Module:
    if name not in node._modules:
        node.add_module(name, nn.Module())
    return node.get_submodule(name)


def _around_layers(model: PreTrainedModel) -> set[nn.Module]:
    """The modules of a stage's copy that every stage has a copy of: those around its layers, and their list."""
    path = text_name(model).split(".")
    around = {model.get_submodule(".".join(path[: i + 1])) for i in range(len(path))}
    return {*around, getattr(decoder_of(model), parts_of(model).layers)}

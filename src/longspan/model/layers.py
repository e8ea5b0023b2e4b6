"""Where the parts of a transformers model are: base and text model, decoder layers, norm, depths, towers beside them.

Also what stands in for a part that another rank holds.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.errors import ModelError


def architecture_name(model: nn.Module) -> str:
    """Return the name of a model's class, without the word that FSDP2 puts before it."""
    return type(model).__name__.removeprefix("FSDP")


class Absent(nn.Module):
    """Stands where another rank holds a module, and hands its first input on.

    It has the strings and numbers of `module`; with `outputs` it returns a tuple of so many values.
    """

    def __init__(self, module: nn.Module | None = None, outputs: int = 0) -> None:
        super().__init__()
        for name, value in ({} if module is None else vars(module)).items():
            if isinstance(value, str | int) and name != "training" and not name.startswith("_"):
                setattr(self, name, value)
        self.outputs = outputs

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the first input as it is, in a tuple if `outputs` says so."""
        return (x, *[None] * (self.outputs - 1)) if self.outputs else x


def copy_shallow_module(module: Any) -> Any:
    """Copy a module but not its children: a child that is replaced in the copy stays in the original."""
    # The copy shares torch's tables of parameters, buffers, children and hooks.
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, dict):
            twin.__dict__[name] = copy.copy(value)
    twin.__dict__.pop("forward", None)  # a forward of the instance is bound to the original
    return twin


def base_model_name(model: PreTrainedModel) -> str:
    """Return where the base model is, "" if nowhere: transformers' attribute, or else the one headless model inside.

    Llama4ForCausalLM keeps its base model at `model`, and its attribute (`base_model_prefix`) says "language_model".
    """
    if model.base_model is not model:
        return model.base_model_prefix
    models_inside = {name: child for name, child in model.named_children() if isinstance(child, PreTrainedModel)}
    without_head = [name for name, child in models_inside.items() if child.get_output_embeddings() is None]
    return without_head[0] if len(models_inside) == len(without_head) == 1 else ""


def base_model(model: PreTrainedModel) -> Any:
    """Return the model below the output embedding, from token ids to the last hidden states; without one the model."""
    return model.get_submodule(base_model_name(model))


def reads_other_modalities(model: PreTrainedModel) -> bool:
    """Return whether a model wraps a text model and encoders of images or the like, by its configuration."""
    return model.config.get_text_config() is not model.config


def text_model_name(model: PreTrainedModel) -> str:
    """Return where the text model in a wrapper of several modalities is; of other models, where the base model is."""
    if not reads_other_modalities(model):
        return base_model_name(model)
    embedding = model.get_input_embeddings()
    inner = ""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and any(child is embedding for child in module.modules()):
            inner = name  # the last is the innermost: a module is listed before those inside it
    return inner


def text_model(model: PreTrainedModel) -> Any:
    """Return the text model inside a wrapper of several modalities; any other model itself."""
    if reads_other_modalities(model):
        return model.get_submodule(text_model_name(model))
    return model


def decoder_model(model: PreTrainedModel) -> Any:
    """Return the model with the decoder layers: a wrapper's text model, or of other models what `base_model` gives."""
    return model.get_submodule(text_model_name(model))


def towers_beside_text_model(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules next to a wrapper's text model that have parameters: encoders, and what projects their rows."""
    text = text_model(model)
    if text is model:
        return []
    siblings = [child for child in base_model(model).children() if text not in {*child.modules()}]
    return [child for child in siblings if any(True for _ in child.parameters())]


# what a projector, or what is around it up to the tower, is called
_PROJECTORS = ("projector", "merger", "connector", "embed_vision")


def is_in_projector(module: str) -> bool:
    """Return whether a module inside or beside a tower belongs to a projector, by its qualified name.

    >>> is_in_projector("model.visual.merger.mlp.0"), is_in_projector("model.visual.blocks.0.mlp")
    (True, False)
    """
    return any(word in module for word in _PROJECTORS)


# A configuration counts attentions where a layer has two (LongCat), and passes where a stack runs several times (HRM).
_LAYER_COUNTS = ("num_hidden_layers", "num_layers")
_STACK_SIZE = "num_layers_per_stack"


def layer_lists(model: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """Return the list of decoder layers, in a wrapper's text model, by name, or the list of each stack of layers.

    ModelError if there is none.
    """
    config = model.config.get_text_config()
    text_prefix = text_model_name(model) if reads_other_modalities(model) else ""
    lists = {
        name: module
        for name, module in text_model(model).named_modules(prefix=text_prefix)
        if isinstance(module, nn.ModuleList)
    }
    stacks = {name: layers for name, layers in lists.items() if len(layers) == getattr(config, _STACK_SIZE, None)}
    if stacks:
        return stacks
    for count in (getattr(config, name, None) for name in _LAYER_COUNTS):
        for name, layers in lists.items():
            if len(layers) == count:
                return {name: layers}
    raise ModelError(
        f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder layers (num_hidden_layers) to be "
        "found"
    )


def layers_of_all_stages(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder layers by qualified name, in order; those of other pipeline stages are `Absent`."""
    return {f"{name}.{i}": layer for name, layers in layer_lists(model).items() for i, layer in enumerate(layers)}


def decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder layers that are here, by qualified name, in order; ModelError without a list of them."""
    layers = layers_of_all_stages(model)
    return {name: layer for name, layer in layers.items() if not isinstance(layer, Absent)}


MTP = "mtp"  # the attribute that holds depths of multi-token prediction, and the prefix of their weights' names


def mtp_depths(model: nn.Module) -> tuple[Any, ...]:
    """Return the depths that `add_mtp` gave a model, in order; none for another model."""
    mtp: Any = model._modules.get(MTP)
    return tuple(mtp.layers) if getattr(type(mtp), "holds_depths", False) else ()


def mtp_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers of a model's depths, by qualified name; a depth may have several, in a list."""
    blocks = dict[str, nn.Module]()
    for i, depth in enumerate(mtp_depths(model)):
        name = f"{MTP}.layers.{i}.mtp_block"
        block = depth.mtp_block
        several = isinstance(block, nn.ModuleList)
        blocks |= {f"{name}.{j}": layer for j, layer in enumerate(block)} if several else {name: block}
    return blocks


def layers_and_mtp_blocks(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder layers that are here, and layers of multi-token prediction, by name."""
    return decoder_layers(model) | mtp_blocks(model)


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """Find the norm after the decoder layers: the child `norm`, or the last child whose class is called a norm.

    It is looked for in the model with the layers, then in the module with their list; None if neither has one. In a
    pipeline stage without the norm `norm` is an `Absent`.
    """
    parent_of_layers = model.get_submodule([*layer_lists(model)][-1].rpartition(".")[0])
    for module in (decoder_model(model), parent_of_layers):
        if isinstance(norm := getattr(module, "norm", None), nn.Module):
            return norm
        if norms := [child for child in module.children() if type(child).__name__.lower().endswith("norm")]:
            return norms[-1]
    return None


def vocabulary_size(model: nn.Module) -> int | None:
    """Return how many token ids a model's input embedding has, or a PipelineModel knows of; None without one."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", getattr(model, "vocabulary_size", None))


def innermost_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the innermost transformers model that holds the decoder layers."""
    layer = next(iter(decoder_layers(model)))
    models = [m for name, m in model.named_modules() if isinstance(m, PreTrainedModel) and layer.startswith(name)]
    return models[-1]  # a module is listed before those inside it


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore at the end of the `with` block the mode, training or evaluation, that every module had before.

    Modes may differ inside a model: a frozen tower may be in evaluation.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                vars(module)["training"] = training  # nn.Module's own assignment checks types many times


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the embedding and the head are one parameter."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight

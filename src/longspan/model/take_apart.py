"""A model from images and text to text as two modules that share its weights: what makes rows of images, and the rest.

    parts = take_apart(LlavaForConditionalGeneration(config))
    parts.encoder                       # ImageEncoder: the tower and the projector, under the model's own names
    parts.language_model                # the same model object, without them

What is taken is what stands next to the text model in the base model. No weight is copied or renamed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapters import belongs_to_adapter
from longspan.model.exactness.image_trial import image_reasons
from longspan.model.layers import base_model, is_in_projector, other_towers, reads_other_modalities
from longspan.model.seams.refusals import doctor_hint
from longspan.model.vision.image_encoder import VisionParts, split_model
from longspan.model.vision.image_tokens import image_tokens

_REASONS = {  # by model type, where the cause is known: clearer than the differences that a trial finds
    "gemma4": "its layers take inputs made of its ids, placeholders among them, which no step hands over; and where "
    "its configuration says so, tokens of an image see each other in layers with a window alone, whereas those of a "
    "shard do so in every layer",
    "mllama": "its layers attend across to its images",
}


def check_vision(model: nn.Module) -> None:
    """Raise ModelError, before anything is changed, for a model that has no parts for images."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not reads_other_modalities(model) or not other_towers(model):
        raise ModelError(
            f"{name} has no tower and projector for images beside a text model, and encoder= gives them a home; "
            "use prepare without encoder=, or MultimodalModel with an encoder of your own (docs/bridge.md)"
        )
    if reasons := image_reasons(model.config):
        kind = model.config.model_type
        raise ModelError(
            f"{name} ({kind}) cannot be given images: {_REASONS.get(kind, '; '.join(reasons))}; use prepare without "
            f"encoder= for text alone{doctor_hint(model)}"
        )
    _check_placeholder_id(model)


def _check_placeholder_id(model: PreTrainedModel) -> None:
    embedding: Any = model.get_input_embeddings()
    placeholder, rows = image_tokens(model.config).placeholder, embedding.weight.shape[0]
    if placeholder >= rows:
        raise ModelError(
            f"{type(model).__name__}: placeholders of images are token id {placeholder}, and its embedding has {rows} "
            "rows; set image_token_id in config.json to an id of the vocabulary, as the tokenizer of its folder has it"
        )


def take_apart(model: PreTrainedModel) -> VisionParts:
    """Take the parts of a vision-language model; afterwards the model itself is the language model, without towers.

    Raises ModelError for a model that has none.
    """
    check_vision(model)
    return split_model(model)


def freeze_images(model: PreTrainedModel, trained: Literal["all", "projector", "none"]) -> None:
    """Choose what of a whole vision-language model's tower and projector is trained, and freeze the other parameters.

    A projector is known by its name (`is_in_projector`); adapters stay as they are. Raises ModelError for "projector"
    where no parameter is a projector's.
    """
    check_vision(model)
    base, towers = base_model(model), other_towers(model)
    children = {name: module for name, module in base.named_children() if module in towers}
    of_images = {f"{child}.{p}": x for child, module in children.items() for p, x in module.named_parameters()}
    of_images = {name: x for name, x in of_images.items() if not belongs_to_adapter(name)}
    separators = dict(base.named_parameters(recurse=False))  # rows between those of images: trained with the projector
    projector = {name for name in of_images if is_in_projector(name.rpartition(".")[0])} | {*separators}
    of_images |= separators
    if trained == "projector" and not projector:
        raise ModelError(
            f"{type(model).__name__} has no module called projector, merger or connector; train all or none of it"
        )
    for name, parameter in of_images.items():
        parameter.requires_grad_(trained == "all" or (trained == "projector" and name in projector))


@contextmanager
def take_apart_or_undo(model: nn.Module) -> Iterator[VisionParts]:
    """Take the model apart for the `with` block; after an error in the block the model is put together again."""
    check_vision(model)
    assert isinstance(model, PreTrainedModel)
    base = base_model(model)
    modules, parameters = dict(base._modules), dict(base._parameters)
    try:
        yield take_apart(model)
    except BaseException:
        base._modules.clear()
        base._modules.update(modules)
        base._parameters.update(parameters)
        raise

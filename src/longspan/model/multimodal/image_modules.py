"""The parts of a model for images and videos: whether it takes any, and which of tower and projector is trained."""

from typing import Any, Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.adapted_modules import belongs_to_adapter
from longspan.model.exactness.image_trial import try_images
from longspan.model.layers import base_model, is_in_projector, reads_other_modalities, towers_beside_text_model
from longspan.model.multimodal.prepare_encoder import encoder_blocks
from longspan.model.seams.doctor_hint import doctor_hint
from longspan.model.vision.image_tokens import image_tokens
from longspan.model.vision.videos import VideoTokens
from longspan.plan.items.encoder_shape import Trained
from longspan.plan.shape.families import find_family


def refuse_model_without_images(model: nn.Module) -> None:
    """Raise ModelError, before anything is changed, for a model that has no parts for images."""
    name = type(model).__name__
    if (
        not isinstance(model, PreTrainedModel)
        or not reads_other_modalities(model)
        or not towers_beside_text_model(model)
    ):
        raise ModelError(
            f"{name} has no tower and projector for images beside a text model, and encoder= gives them a home; "
            "use prepare without encoder=, or MultimodalModel with an encoder of your own (docs/bridge.md)"
        )
    if reasons := try_images(model.config).reasons:
        kind = model.config.model_type
        raise ModelError(
            f"{name} ({kind}) cannot be given images: {find_family(kind).no_images or '; '.join(reasons)}; use prepare "
            f"without encoder= for text alone{doctor_hint(model)}"
        )
    embedding: Any = model.get_input_embeddings()
    placeholder = image_tokens(model.config).placeholder
    rows = embedding.weight.shape[0]
    if placeholder >= rows:
        raise ModelError(
            f"{type(model).__name__}: placeholders of images are token id {placeholder}, and its embedding has {rows} "
            "rows; set image_token_id in config.json to an id of the vocabulary, as the tokenizer of its folder has it"
        )


def video_tokens(config: PreTrainedConfig) -> VideoTokens:
    """Return the tokens by which a model of this configuration takes videos; groups of frames are items, as images are.

    Once for each configuration a small copy of the model is given videos, whole and as items. Raises ModelError where
    the two differ, and for a model without videos.

    >>> video_tokens(AutoConfig.from_pretrained("Qwen3-VL-8B")).rows((3, 4, 6))  # doctest: +SKIP
    [6, 6, 6]
    """
    tokens = VideoTokens.from_configuration(config)
    if reasons := try_images(config, videos=True).reasons:
        raise ModelError(
            f"{type(config).__name__} ({config.model_type}) cannot be given videos: {'; '.join(reasons)}; give frames "
            "as images"
        )
    return tokens


def freeze_image_modules(model: PreTrainedModel, trained: Literal["all", "projector", "none"]) -> None:
    """Choose what of a whole vision-language model's tower and projector is trained, and freeze the rest of them.

    Parameters of adapters and of the language model stay as they are. A projector is known by its name. ModelError for
    "projector" where no parameter is one's.
    """
    refuse_model_without_images(model)
    base = base_model(model)
    towers = towers_beside_text_model(model)
    children = {name: module for name, module in base.named_children() if module in towers}
    image_parameters = {
        f"{child}.{p}": x for child, module in children.items() for p, x in module.named_parameters()
    }
    image_parameters = {name: x for name, x in image_parameters.items() if not belongs_to_adapter(name)}
    # the base model's own parameters are rows between those of images: trained with the projector
    separators = dict(base.named_parameters(recurse=False))
    projector = {name for name in image_parameters if is_in_projector(name.rpartition(".")[0])} | {*separators}
    image_parameters |= separators
    if trained == "projector" and not projector:
        raise ModelError(
            f"{type(model).__name__} has no module called projector, merger, connector or embed_vision; train all or "
            "none of it"
        )
    for name, parameter in image_parameters.items():
        parameter.requires_grad_(trained == "all" or (trained == "projector" and name in projector))


def find_trained_part(encoder: nn.Module) -> Trained:
    """Return which part of a tower and projector is trained ("all" if any block is), before or after sharding."""
    if any(p.requires_grad for block in encoder_blocks(encoder).values() for p in block.parameters()):
        return "all"
    return "projector" if any(p.requires_grad for p in encoder.parameters()) else "none"

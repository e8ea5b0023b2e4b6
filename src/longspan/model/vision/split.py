"""A model from images and text to text in two parts, whatever it does with images; `take_apart.py` asks that first."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from longspan.model.layers import base_name, base_of, other_towers, shallow_module, text_of
from longspan.model.vision.image_encoder import ImageEncoder
from longspan.model.vision.image_tokens import ImageTokens, image_tokens


@dataclass(frozen=True)
class VisionParts:
    """The two modules of a vision-language model, and what its ids and positions say of images.

    `deep_layers` decoder layers get a part of every image row added to what they return (DeepStack).
    """

    encoder: ImageEncoder
    language_model: PreTrainedModel
    tokens: ImageTokens

    @property
    def deep_layers(self) -> int:
        """How many parts a row has beside the one at the embedding."""
        return self.encoder.deep_layers


def split(model: PreTrainedModel) -> VisionParts:
    """The parts of a vision-language model; afterwards the model itself is the language model, without towers."""
    base, text, towers = base_of(model), text_of(model), other_towers(model)
    name_of_base = base_name(model)  # which without its towers may have another
    shell = shallow_module(base)
    for name, child in list(base.named_children()):
        if child in towers:
            del base._modules[name]
        elif any(module is text for module in child.modules()):
            del shell._modules[name]
    base._parameters.clear()  # they are of images too: what ends a line of patches, say
    return VisionParts(ImageEncoder(shell, name_of_base), model, image_tokens(model.config))

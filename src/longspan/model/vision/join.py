"""The two modules of a vision-language model under homes of their own, joined again as one model.

    model = longspan.prepare(load_model("Qwen3-VL-8B"), world, encoder=Layout(ranks=8))

Where the encoder's home is given as a Layout, its world is opened next to the language model's and left with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.multimodal.encoder import Encoder
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.vision.image_cost import image_cost
from longspan.model.vision.image_encoder import VisionParts, pack_attention
from longspan.model.weights.fill import DeferredWeights
from longspan.plan.cost.cost import Cost
from longspan.plan.shape.model_shape import SEEN_BY_IMAGES

IMAGE = "image"
_ENCODER, _LANGUAGE_MODEL = f"encoders.{IMAGE}.", "language_model."


@dataclass(frozen=True, kw_only=True)
class EncoderHome:
    """Where the tower and projector of a vision-language model run, and how images are dealt out to it.

    `home` is a Layout, or the open World of one, over the language model's ranks. The others are those of `Encoder` and
    of `prepare_encoder`; without a `cost`, images are priced by the model's vision configuration.
    """

    home: Layout | World
    max_rows_per_slot: int | None = None
    recompute: bool = False
    cost: Cost | None = None
    shard_parameters: bool = True
    activation_checkpointing: bool | str = False
    compute_dtype: Any = None
    tp_plan: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def layout(self) -> Layout:
        """The encoder's Layout, also where its World is given."""
        return self.home if isinstance(self.home, Layout) else self.home.home

    @classmethod
    def of(cls, encoder: "Layout | World | EncoderHome", **options: Any) -> "EncoderHome":
        """Return the argument of `prepare(encoder=…)` as an EncoderHome.

        A Layout or World gets these `options`, those of the language model. Raises ModelError for another type.
        """
        if isinstance(encoder, EncoderHome):
            return encoder
        if not isinstance(encoder, Layout | World):
            raise ModelError(
                f"encoder is a {type(encoder).__name__}; give a Layout over the language model's ranks, its open "
                "World, or EncoderHome(home=…) with settings"
            )
        return cls(home=encoder, **options)


def join_parts(
    parts: VisionParts,
    language_model: PreTrainedModel | PipelineModel,
    world: World,
    settings: EncoderHome,
    weights: DeferredWeights | None,
) -> MultimodalModel:
    """Prepare the images' encoder under its own layout, and join it with a prepared language model.

    `weights` fill an encoder on the meta device; None: it has values. All ranks call it together.
    """
    encoder_world = world.open_inner(settings.home) if isinstance(settings.home, Layout) else settings.home
    if weights is not None:
        weights.of(parts.encoder).fill_weights([parts.encoder], encoder_world)
    recomputed_passes = int(settings.recompute) + int(bool(settings.activation_checkpointing))
    cost = settings.cost or image_cost(
        language_model.config, parts.encoder, again=recomputed_passes, gpu=world.device.type == "cuda"
    )
    pack_attention(parts.encoder)
    module: nn.Module = prepare_encoder(
        parts.encoder,
        encoder_world,
        shard_parameters=settings.shard_parameters,
        activation_checkpointing=settings.activation_checkpointing,
        compute_dtype=settings.compute_dtype,
        tp_plan=settings.tp_plan,
    )
    encoder = Encoder(
        module=module,
        world=encoder_world,
        max_rows_per_slot=settings.max_rows_per_slot,
        recompute=settings.recompute,
        cost=cost,
        deep_layers=parts.deep_layers,
        in_spans=language_model.config.model_type in SEEN_BY_IMAGES,
    )
    return MultimodalModel({IMAGE: encoder}, language_model, world)


def map_stock_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of parameters in the model's own class to their names in a MultimodalModel.

    >>> map_stock_names(["encoders.image.model.visual.pos_embed.weight"])
    {'model.visual.pos_embed.weight': 'encoders.image.model.visual.pos_embed.weight'}

    Names of other models map to themselves.
    """
    names = list(names)
    if not are_multimodal(names):
        return {name: name for name in names}
    return {name.removeprefix(_ENCODER).removeprefix(_LANGUAGE_MODEL): name for name in names}


def are_multimodal(names: Iterable[str]) -> bool:
    """Return whether parameters of these names are a MultimodalModel's: of an encoder, and of a language model."""
    return all(name.startswith((_ENCODER, _LANGUAGE_MODEL)) for name in names)

"""The two modules of a vision-language model under homes of their own, joined again as one model.

    model = longspan.prepare(load_model("Qwen3-VL-8B"), world, encoder=Layout(ranks=8))

Where the encoder's home is given as a Layout, its world is opened next to the language model's and left with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError, PlanError
from longspan.layout import Layout
from longspan.model.multimodal.multimodal_model import IMAGE, Encoder, MultimodalModel
from longspan.model.multimodal.prepare_encoder import encoder_blocks, prepare_encoder
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.vision.image_encoder import VisionParts, pack_attention
from longspan.model.weights.fill import DeferredWeights
from longspan.plan.cost.cost import Cost
from longspan.plan.items.encoder_shape import EncoderShape, Trained, window_layers
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import SEEN_BY_IMAGES

_LAYERS = ("depth", "num_hidden_layers")
_WIDTHS = ("embed_dim", "hidden_size")  # embed_dim first: Qwen2-VL's hidden_size is the language model's width


def image_cost(config: PreTrainedConfig, encoder: nn.Module, *, again: int = 0, gpu: bool = False) -> Cost:
    """Price an image's rows, for `Encoder(cost=…)`: linear layers, attention in windows and over the whole image.

    `encoder` is the whole tower and projector, before it is sharded. Of frozen parts only the forward pass is priced.
    `again` is how many more forward passes recomputation makes for a backward pass; `gpu`: seconds are those of an
    H200, else of CPUs. A tower whose configuration does not give a price is priced by its parameters.
    """
    try:
        shape = EncoderShape.of(config)
    except PlanError:
        shape = _counted_shape(config, encoder)
    return shape.cost(trained=find_trained_part(encoder), again=again, gpu=gpu)


def find_trained_part(encoder: nn.Module) -> Trained:
    """Return which part of a tower and projector is trained ("all" if any block is), before or after sharding."""
    if any(p.requires_grad for block in encoder_blocks(encoder).values() for p in block.parameters()):
        return "all"
    return "projector" if any(p.requires_grad for p in encoder.parameters()) else "none"


def _counted_shape(config: PreTrainedConfig, encoder: nn.Module) -> EncoderShape:
    """Return a tower's shape by the numbers in its blocks' matrices, its width, and its layers with windows."""
    vision: Any = getattr(config, "vision_config", None)
    width, layers = _first_value(vision, _WIDTHS), _first_value(vision, _LAYERS)
    in_blocks = sum(p.numel() for block in encoder_blocks(encoder).values() for p in block.parameters() if p.ndim > 1)
    merge = getattr(vision, "spatial_merge_size", None) or 1
    windows, side = window_layers(ConfigReader.read_whole(config).section("vision_config"), layers)
    full_layers, in_windows = layers - windows, {"window_layers": windows, "window": side}
    return EncoderShape(width=width, full_layers=full_layers, block_weights=in_blocks, merge=merge, **in_windows)


def _first_value(config: Any, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


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

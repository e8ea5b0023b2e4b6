"""A model from images and text to text as two modules, its encoder and its language model, and joined under two homes.

The encoder is what stands next to the text model in the base model; no weight is copied or renamed. A Layout as its
home is opened as a World next to the language model's and left with it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError, PlanError
from longspan.layout import Layout
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.model.adapters.adapter import find_adapter
from longspan.model.adapters.adapter_rules import check_encoder_adapter
from longspan.model.adapters.disable_adapter import redirect_peft_model
from longspan.model.exactness.image_trial import try_images
from longspan.model.layers import base_model
from longspan.model.marks import name_parameters
from longspan.model.multimodal.image_modules import find_trained_part, refuse_model_without_images
from longspan.model.multimodal.multimodal_model import IMAGE, Encoder, MultimodalModel, check_encoder_home
from longspan.model.multimodal.prepare_encoder import encoder_blocks, prepare_encoder
from longspan.model.options import PrepareOptions
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.vision.image_encoder import ImageEncoder, pack_attention, split_off_image_encoder
from longspan.model.weights.fill import DeferredWeights, find_deferred_weights
from longspan.plan.cost.cost import Cost
from longspan.plan.items.encoder_shape import EncoderShape, read_window_layers
from longspan.plan.shape.config_reader import ConfigReader


@contextmanager
def split_off_image_encoder_or_undo(model: nn.Module) -> Iterator[ImageEncoder]:
    """Take a model's tower and projector from it, and yield them as one encoder; the model has them no more.

    After an error in the `with` block the model is put together again. ModelError for a model without them.
    """
    refuse_model_without_images(model)
    assert isinstance(model, PreTrainedModel)
    base = base_model(model)
    modules = dict(base._modules)
    parameters = dict(base._parameters)
    try:
        yield split_off_image_encoder(model)
    except BaseException:
        base._modules.clear()
        base._modules.update(modules)
        base._parameters.update(parameters)
        raise


@dataclass(frozen=True, kw_only=True)
class EncoderHome:
    """Where the tower and projector of a vision-language model run, and how images are dealt out to it.

    `home` is over the language model's ranks. The other fields mean what they do in `Encoder` and `prepare_encoder`;
    without a `cost`, images are priced by the model's vision configuration.
    """

    home: Layout
    max_rows_per_slot: int | None = None
    recompute: bool = False
    cost: Cost | None = None
    shard_parameters: bool = True
    activation_checkpointing: bool | str = False
    compute_dtype: Any = None
    tp_plan: Mapping[str, str] = field(default_factory=dict[str, str])


@contextmanager
def take_encoder_apart(
    model: nn.Module, world: World, encoder: object, options: PrepareOptions
) -> Iterator[Callable[[Any], MultimodalModel]]:
    """Take a model's tower and projector from it while its language model is prepared inside.

    Yields the function that prepares them too, under the home `encoder`, and joins both. After an error the model is
    put together again. Raises ModelError for a model without them, and for a home or an adapter that does not fit them.
    """
    settings = encoder
    if isinstance(encoder, Layout):
        settings = EncoderHome(
            home=encoder, shard_parameters=options.shard_parameters, compute_dtype=options.compute_dtype
        )
    if not isinstance(settings, EncoderHome):
        raise ModelError(
            f"encoder is a {type(encoder).__name__}; give a Layout over the language model's ranks, or "
            "EncoderHome(home=…) with settings"
        )
    whole = unwrap_peft_model(model)
    weights = find_deferred_weights(whole)
    adapter = find_adapter(whole)
    name_parameters(whole)
    check_encoder_home(IMAGE, settings.home, world)
    with split_off_image_encoder_or_undo(whole) as image_encoder:
        if adapter is not None:
            check_encoder_adapter(image_encoder, adapter, settings.home.tp)

        def join(language_model: Any) -> MultimodalModel:
            language_model.adapter = adapter  # also if only the encoder has one
            prepared = _prepare_and_join_encoder(image_encoder, language_model, world, settings, weights)
            redirect_peft_model(model, prepared)
            return prepared

        yield join


def _prepare_and_join_encoder(
    image_encoder: ImageEncoder,
    language_model: PreTrainedModel | PipelineModel,
    world: World,
    settings: EncoderHome,
    weights: DeferredWeights | None,
) -> MultimodalModel:
    """`weights` None: the whole model has its weights."""
    encoder_world = world.open_inner(settings.home)
    if weights is not None:
        DeferredWeights(image_encoder, weights.source).fill_weights([image_encoder], encoder_world)
    recomputed_passes = int(settings.recompute) + int(bool(settings.activation_checkpointing))
    cost = settings.cost or image_cost(
        language_model.config, image_encoder, again=recomputed_passes, gpu=world.device.type == "cuda"
    )
    pack_attention(image_encoder)
    # No step has sounds, by which their tower and projector would get gradients.
    for name, parameter in image_encoder.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and "audio" not in name)
    module: nn.Module = prepare_encoder(
        image_encoder,
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
        deep_layers=image_encoder.deep_layers,
        in_spans=bool(try_images(language_model.config).spans),
    )
    return MultimodalModel({IMAGE: encoder}, language_model, world)


def image_cost(config: PreTrainedConfig, encoder: nn.Module, *, again: int, gpu: bool) -> Cost:
    """Return the price of an image's rows, for `Encoder(cost=…)`: linears, attention in windows and over the image.

    `encoder` is not sharded yet; of frozen parts only the forward pass is priced; recomputation runs forward `again`
    times; `gpu`: seconds are an H200's, else of CPUs.
    """
    try:
        shape = EncoderShape.of(config)
    except PlanError:  # then sizes are the configuration's, and weights of blocks those of the encoder itself
        vision = ConfigReader.read_whole_model(config).section("vision_config")
        layers = vision.count("depth", "num_hidden_layers")
        windows, side = read_window_layers(vision, layers)
        # An encoder without blocks (Gemma 4 unified) is linears around a table of positions.
        blocks = [*encoder_blocks(encoder).values()] or [m for m in encoder.modules() if isinstance(m, nn.Linear)]
        block_matrices = (p for block in blocks for p in block.parameters() if p.ndim > 1)
        shape = EncoderShape(
            width=vision.count("embed_dim", "hidden_size"),  # Qwen2-VL's hidden_size is the language model's width
            full_layers=layers - windows,
            block_weights=sum(p.numel() for p in block_matrices),
            merge=(layers and vision.count("spatial_merge_size", "pooling_kernel_size")) or 1,
            window_layers=windows,
            window=side,
        )
    return shape.cost(trained=find_trained_part(encoder), again=again, gpu=gpu)

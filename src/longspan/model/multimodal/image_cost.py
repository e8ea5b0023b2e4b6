"""What an image's rows cost in an encoder, by which images are dealt out to slots."""

from torch import nn
from transformers import PreTrainedConfig

from longspan.errors import PlanError
from longspan.model.multimodal.image_modules import find_trained_part
from longspan.model.multimodal.prepare_encoder import encoder_blocks
from longspan.plan.cost.cost import Cost
from longspan.plan.items.encoder_shape import EncoderShape, read_window_layers
from longspan.plan.shape.config_reader import ConfigReader


def image_cost(config: PreTrainedConfig, encoder: nn.Module, *, again: int, gpu: bool) -> Cost:
    """Return the price of an image's rows, for `Encoder(cost=…)`: linears, attention in windows and over the image.

    `encoder` is not sharded yet; of frozen parts only the forward pass is priced; recomputation runs forward `again`
    times; `gpu`: seconds are an H200's, else of CPUs.
    """
    try:
        shape = EncoderShape.of(config)
    except PlanError:
        shape = _encoder_shape_from_modules(config, encoder)
    return shape.cost(trained=find_trained_part(encoder), again=again, gpu=gpu)


def _encoder_shape_from_modules(config: PreTrainedConfig, encoder: nn.Module) -> EncoderShape:
    """Read what `EncoderShape.of` could not: sizes of the configuration, weights of blocks from the encoder itself."""
    vision = ConfigReader.read_whole_model(config).section("vision_config")
    layers = vision.count("depth", "num_hidden_layers")
    windows, side = read_window_layers(vision, layers)
    block_matrices = (p for block in encoder_blocks(encoder).values() for p in block.parameters() if p.ndim > 1)
    return EncoderShape(
        width=vision.count("embed_dim", "hidden_size"),  # Qwen2-VL's hidden_size is the language model's width
        full_layers=layers - windows,
        block_weights=sum(p.numel() for p in block_matrices),
        merge=vision.count("spatial_merge_size") or 1,
        window_layers=windows,
        window=side,
    )

"""What images take of a rank's memory besides the language model's rows, measured on the encoder itself.

While the language model runs, a rank holds the rows of images that it owns, their gradients, and, where waves are not
encoded again, the activations of all images that it encodes. A wave's own activations have the memory to themselves.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.comm import World
from longspan.errors import ConfigError
from longspan.model.exactness.trial_documents import draw_probe_image
from longspan.model.multimodal.encoder import Encoder
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.parts import preserve_modes
from longspan.model.sharding import reshard
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, image_tokens
from longspan.train.memory.live_bytes import LiveBytes

PROBE_ROWS = 64  # rows of the image that is measured; bytes of a row are alike for images of any size
UNEVEN = 1.25  # times the mean rows of a step, for steps with more images


@dataclass(frozen=True)
class ImageBytes:
    """Bytes of a rank: `held_bytes` while the language model runs, `wave_bytes` while a wave of `wave_rows` is encoded.

    `row_bytes` are those of the activations for one row, of the encoder with the largest wave.
    """

    held_bytes: int
    wave_bytes: int
    wave_rows: int
    row_bytes: float

    def check_budget(self, budget: float) -> None:
        """Raise ConfigError where a wave, or what is held, does not fit a budget of bytes."""
        if self.wave_bytes > budget:
            raise ConfigError(
                f"a wave of images of {self.wave_rows:,} rows of a slot takes {self.wave_bytes:,} bytes, and the "
                f"budget is {budget:,.0f}; set encoder.max_rows to at most {math.floor(budget / self.row_bytes):,}, "
                "with encoder.recompute = true"
            )
        if self.held_bytes >= budget:
            raise ConfigError(
                f"images of a step hold {self.held_bytes:,} bytes of a rank while the language model runs, and the "
                f"budget is {budget:,.0f}; set encoder.recompute = true with encoder.max_rows, or fewer "
                "train.tokens_per_step"
            )


def measure_images(model: MultimodalModel, rows: float, world: World, *, uses: int = 1) -> ImageBytes:
    """Measure the bytes that images of a step take on the rank that needs most; entered by all ranks.

    `rows` are the rows of images of a step on all slots together. `uses` is how often a rank holds such a row: once for
    the row's own place, and once for each depth of multi-token prediction. Each use has a gradient as well.
    """
    held_bytes, waves = 0.0, list[tuple[float, int, float]]()
    for encoder in model.encoder_settings.values():
        slot_rows = UNEVEN * rows / encoder.world.home.slots  # an encoder may have other slots than the language model
        tokens = image_tokens(model.config)
        # an image's row has one part for the embedding, and one for each decoder layer that it is added to
        width = model.config.get_text_config().hidden_size * (1 + encoder.deep_layers)
        itemsize = next(encoder.module.parameters()).element_size()
        held_bytes += 2 * uses * width * itemsize * UNEVEN * rows / world.home.slots  # rows and their gradients
        (row_bytes,) = world.control.largest_of([_measure_row_bytes(encoder, tokens)], "bytes of images")
        wave_rows = math.ceil(min(encoder.max_rows_per_slot or slot_rows, slot_rows))
        waves.append((row_bytes * wave_rows, wave_rows, row_bytes))
        if not (encoder.recompute or encoder.frozen):
            held_bytes += row_bytes * slot_rows
    wave_bytes, wave_rows, row_bytes = max(waves)
    return ImageBytes(round(held_bytes), round(wave_bytes), wave_rows, row_bytes)


def _measure_row_bytes(encoder: Encoder, tokens: ImageTokens) -> float:
    """Measure the bytes of a row in the forward pass of one image, with a graph unless the encoder is frozen.

    Every rank enters it.
    """
    module, device = encoder.module, encoder.world.device
    image = draw_probe_image(module.base, tokens.merge, PROBE_ROWS)
    with preserve_modes(module), torch.set_grad_enabled(not encoder.frozen):
        _ = _run_encoder(encoder, image)  # the first call makes buffers that stay, which are not to be counted
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            bytes_before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            rows = _run_encoder(encoder, image)
            peak = torch.cuda.max_memory_allocated(device) - bytes_before
        else:
            with LiveBytes() as live_bytes:
                rows = _run_encoder(encoder, image)
            peak = live_bytes.peak
        reshard(module)
        return peak / len(rows)


def _run_encoder(encoder: Encoder, image: ImageInput) -> Tensor:
    """Return the rows (n, D) of one image."""
    return encoder.module([image])

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
from longspan.model.exactness.trial_documents import probe_image
from longspan.model.multimodal.encoder import Encoder
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.parts import preserve_modes
from longspan.model.sharding import reshard
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, image_tokens
from longspan.train.memory.live_bytes import LiveBytes

PROBE_ROWS = 64  # rows of the image that is measured; bytes of a row are alike for images of any size
UNEVEN = 1.25  # times the mean rows of a step, for steps with more images


@dataclass(frozen=True)
class ImagesHeld:
    """Bytes of a rank: `held` while the language model runs, `wave` at most while one wave of `wave_rows` is encoded.

    `row` are the bytes of activations of one row.
    """

    held: int
    wave: int
    wave_rows: int
    row: float

    def check_budget(self, budget: float) -> None:
        """Raise ConfigError where a wave, or what is held, does not fit a budget of bytes."""
        if self.wave > budget:
            raise ConfigError(
                f"a wave of images of {self.wave_rows:,} rows of a slot takes {self.wave:,} bytes, and the budget is "
                f"{budget:,.0f}; set encoder.max_rows to at most {math.floor(budget / self.row):,}, with "
                "encoder.recompute = true"
            )
        if self.held >= budget:
            raise ConfigError(
                f"images of a step hold {self.held:,} bytes of a rank while the language model runs, and the budget is "
                f"{budget:,.0f}; set encoder.recompute = true with encoder.max_rows, or fewer train.tokens_per_step"
            )


def measure_images(model: MultimodalModel, rows: float, world: World, *, uses: int = 1) -> ImagesHeld:
    """Measure the bytes that images of a step take on the rank that needs most; entered by all ranks.

    `rows` are the rows of images of a step on all slots together. `uses` is how often a rank holds such a row: once for
    the row's own place, and once for each depth of multi-token prediction. Each use has a gradient as well.
    """
    step_bytes = wave = 0.0
    wave_rows, row = 0, 0.0
    for encoder in model.encoder_settings.values():
        slot_rows = UNEVEN * rows / encoder.world.home.slots
        tokens = image_tokens(model.config)
        # an image's row has one part for the embedding, and one for each decoder layer that it is added to
        width = model.config.get_text_config().hidden_size * (1 + encoder.deep_layers)
        itemsize = next(encoder.module.parameters()).element_size()
        step_bytes += 2 * uses * width * itemsize * UNEVEN * rows / world.home.slots
        row = _measure_row_bytes(encoder, tokens)
        wave_rows = math.ceil(min(encoder.max_rows_per_slot or slot_rows, slot_rows))
        wave = max(wave, row * wave_rows)
        if not (encoder.recompute or encoder.frozen):
            step_bytes += row * slot_rows
    step_bytes, wave, row = world.control.largest_of([step_bytes, wave, row], "bytes of images")
    return ImagesHeld(round(step_bytes), round(wave), wave_rows, row)


def _measure_row_bytes(encoder: Encoder, tokens: ImageTokens) -> float:
    """Measure a forward pass of one image: bytes of a row, with a graph unless the encoder is frozen; on every rank."""
    module, device = encoder.module, encoder.world.device
    image = probe_image(module.base, tokens.merge, PROBE_ROWS)
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

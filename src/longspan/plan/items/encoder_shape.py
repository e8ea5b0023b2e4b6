"""The sizes of an image encoder by its model's configuration, and its work by them: FLOPs and cost.

Towers are those of Qwen's vision-language models, LLaVA, Gemma 3 and PaliGemma, as transformers describes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost
from longspan.plan.cost.machine import Machine
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.families import FAMILIES

Trained = Literal["all", "projector", "none"]

# An image has so many rows if a configuration has no number.
_GEMMA_ROWS = 256
# Kernels pad a head to this multiple (attention/kernels/fa4.py).
_HEAD_MULTIPLE = 32
# Of narrow products and rotary angles in float32, over a decoder's; both from vision-step-4xH200 in measured.json.
ENCODER_SPEED = 240 / 700
# The launches of a wave on GPUs take so long.
WAVE_SECONDS = 2e-3


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """The sizes of a tower and its projector that decide the time of an image.

    >>> shape = EncoderShape.of("Qwen3-VL-8B/config.json")  # doctest: +SKIP
    >>> shape.flops([256])  # of an image of 256 rows, forward and backward  # doctest: +SKIP
    3170667331584

    `embed_weights` and `block_weights` multiply every patch, `projector_weights` every row; `entry_weights` of these
    multiply what nothing before them in the projector trains. In `full_layers` the patches of an image see each other,
    in `window_layers` those of a square of `window` patches a side. A row is `merge` x `merge` patches. Where all
    images have one size, `merge` is 0: an image has `patches`, which become `rows`, and `class_rows` go through the
    blocks with the patches.
    """

    width: int
    head_dim: int = _HEAD_MULTIPLE
    full_layers: int
    block_weights: int
    embed_weights: int = 0
    projector_weights: int = 0
    entry_weights: int = 0
    window_layers: int = 0
    window: int = 0
    merge: int = 0
    patches: int = 0
    rows: int = 0
    class_rows: int = 0

    @classmethod
    def of(cls, config: Any) -> "EncoderShape":
        """Read the shape of a whole model's configuration, an object or dict like one, a config.json or its folder.
        Raises PlanError for one without images, or with a tower that is not priced.
        """
        model = ConfigReader.read_whole_model(config)
        vision = model.section("vision_config")
        text = ConfigReader.read_language_model(config)
        if not model.family.images or not vision.count("depth", "num_hidden_layers"):
            priced = [name.removesuffix("*") for name, family in FAMILIES.items() if family.images]
            raise PlanError(
                f"{model.where} ({model.model_type or 'no model_type'}) has no tower that its configuration prices; "
                f"those of {', '.join(priced)} have"
            )
        if model.family.images == "merged":
            return _read_merging_tower(model.family.gated_tower, vision, text.require_count("hidden_size"))
        return _read_fixed_size_tower(model, vision, text.require_count("hidden_size"))

    def patch_count(self, rows: int) -> int:
        return rows * self.merge**2 if self.merge else self.patches

    def flops(self, images: Sequence[int], *, trained: Trained = "all") -> int:
        """Count the FLOPs of forward and backward by the convention of `model_flops`; `images` are the rows of each. A
        pair of patches that see each other takes 12 x width; windows that an edge cuts count as whole ones. Of parts
        that are not `trained` only forward counts.
        """
        pair_flops = (12 if trained == "all" else 4) * self.width
        flops = 0
        for rows in images:
            patches = self.patch_count(rows)
            pairs = (
                self.full_layers * (patches + self.class_rows) ** 2 + self.window_layers * patches * self.window**2
            )
            flops += self._weight_flops(rows, trained) + pair_flops * pairs
        return flops

    def _weight_flops(self, rows: int, trained: Trained) -> int:
        """2 FLOPs for each patch or row forward, 2 for the gradient of its input, and 2 for a weight's own gradient.
        Frozen parts run forward only. The first layer that is trained (the patch embedding, or the projector's
        entry) needs no gradient of its input."""
        patches = self.patch_count(rows)
        tower = trained == "all"
        projector = trained != "none"
        flops = (4 if tower else 2) * self.embed_weights * patches
        flops += (6 if tower else 2) * self.block_weights * (patches + self.class_rows)
        flops -= 2 * self.entry_weights * rows if trained == "projector" else 0
        return flops + (6 if projector else 2) * self.projector_weights * rows

    def cost(self, *, trained: Trained = "all", again: int = 0, gpu: bool = True) -> Cost:
        """Price the encoding of rows, for `Encoder(cost=…)`: on H200s, or, unless `gpu`, on CPUs, where `source` is "".
        `again` is how often the forward pass runs again for the backward pass.

        Seconds are those of an output row, which stands for several patches. A pair of patches takes 4 x width FLOPs
        forward and 10 x width backward, where scores are computed again; on GPUs heads are padded as kernels pad them.
        In layers that attend to all patches of an image, seconds grow with their square; in those with windows a patch
        has as many pairs as a window has patches.
        """
        padded_head_dim = -(-self.head_dim // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        machine = Machine.known("H200") if gpu else Machine.cpus()
        attention = machine.attention_flops_per_second * (self.head_dim / padded_head_dim if gpu else 1)
        repeats = again if trained != "none" else 0  # nothing is trained: there is no backward pass
        pair_seconds = ((14 if trained == "all" else 4) + 4 * repeats) * self.width / attention
        rows = self.rows or 1
        patches_per_row = (self.patch_count(rows) + self.class_rows) / rows
        flops = self._weight_flops(rows, trained) + repeats * self._weight_flops(rows, "none")
        return Cost(
            linear_seconds=flops / rows / ((ENCODER_SPEED if gpu else 1) * machine.product_flops_per_second)
            + pair_seconds * patches_per_row * self.window_layers * self.window**2,
            attention_seconds=pair_seconds * self.full_layers * patches_per_row**2,
            micro_batch_seconds=WAVE_SECONDS if gpu else machine.micro_batch_seconds,
            source=machine.source,
        )


def read_window_layers(vision: ConfigReader, layers: int) -> tuple[int, int]:
    """Return how many of a tower's layers attend in windows, and the patches of a window's side; (0, 0): none does."""
    full_layers = vision.value("fullatt_block_indexes")
    if full_layers is None or not (pixels := vision.count("window_size")):
        return 0, 0
    window_layers = sum(layer not in full_layers for layer in range(layers))
    if not window_layers:
        return 0, 0
    return window_layers, pixels // _read_size(vision, "patch_size")


def _read_merging_tower(gated: bool, vision: ConfigReader, hidden: int) -> EncoderShape:
    """A Qwen tower's block has four square projections of attention and an MLP of two matrices, of three if `gated`.
    A merger takes merge² patches side by side: one linear keeps that width, another makes a row of the text model
    (`hidden` numbers) of it. There is one merger, and one more for each layer that DeepStack reads. A patch has
    the pixels of one frame or several."""
    width = vision.count("embed_dim", "hidden_size")
    layers = vision.count("depth")
    merge = _read_size(vision, "spatial_merge_size")
    mlp_width = vision.count("intermediate_size") or int(width * float(vision.value("mlp_ratio") or 4))
    windows, window = read_window_layers(vision, layers)
    mergers = 1 + len(vision.value("deepstack_visual_indexes") or ())
    pixels = (vision.count("in_channels", "in_chans") or 3) * _read_size(vision, "patch_size") ** 2
    return EncoderShape(
        width=width,
        head_dim=width // vision.count("num_heads"),
        full_layers=layers - windows,
        window_layers=windows,
        window=window,
        block_weights=layers * width * (4 * width + (3 if gated else 2) * mlp_width),
        embed_weights=width * pixels * _read_size(vision, "temporal_patch_size"),
        projector_weights=mergers * width * merge**2 * (width * merge**2 + hidden),
        merge=merge,
    )


def _read_fixed_size_tower(model: ConfigReader, vision: ConfigReader, hidden: int) -> EncoderShape:
    """CLIP or SigLIP, up to the last layer whose features the projector reads; rows of the text model have `hidden`
    numbers. Gemma 3 pools patches before one projection, PaliGemma projects each patch; others (LLaVA) project
    the features of one layer or several by two linears, without the class row unless it is kept."""
    width = vision.count("hidden_size")
    layers = vision.count("num_hidden_layers")
    patches = (vision.count("image_size") // _read_size(vision, "patch_size")) ** 2
    class_rows = int("clip" in vision.model_type)
    layers_read = [layers]
    # The rows are those of pooled patches.
    rows = model.count("mm_tokens_per_image") or _GEMMA_ROWS
    if model.family.images == "pooled":
        projector = width * hidden
        entry = 0
    elif model.family.images == "patches":
        projector = width * hidden
        entry = projector
        rows = patches
    else:
        features: Any = model.value("vision_feature_layer")
        if features is None:
            features = -2
        if isinstance(features, int):
            features = [features]
        layers_read = [layer if layer >= 0 else layers + 1 + layer for layer in features]  # 0 is the embedding
        entry = hidden * len(layers_read) * width
        projector = entry + hidden**2
        rows = patches + class_rows
        if model.value("vision_feature_select_strategy") != "full":
            rows -= 1  # the first one is dropped, whether it is a class row or not
    return EncoderShape(
        width=width,
        head_dim=width // vision.count("num_attention_heads"),
        full_layers=max(layers_read),
        block_weights=max(layers_read) * width * (4 * width + 2 * vision.count("intermediate_size")),
        embed_weights=width * (vision.count("num_channels") or 3) * _read_size(vision, "patch_size") ** 2,
        projector_weights=projector,
        entry_weights=entry,
        patches=patches,
        rows=rows,
        class_rows=class_rows,
    )


def _read_size(vision: ConfigReader, name: str) -> int:
    """Of a pair (height, width) the height."""
    value: Any = vision.value(name)
    return int(value[0]) if isinstance(value, (list, tuple)) else vision.count(name)  # pyright: ignore[reportUnknownArgumentType]

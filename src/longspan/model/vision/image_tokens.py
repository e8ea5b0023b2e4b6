"""Images in the token ids and positions of a vision-language model, and as arguments of `get_image_features`.

tokens = image_tokens(AutoConfig.from_pretrained(folder))
positions = tokens.positions(ids, grids)            # (3, T), by the model's own `get_rope_index`; None if plain
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MODEL_MAPPING, AutoModel, PreTrainedConfig

from longspan.errors import DataError, ModelError, plural
from longspan.layout import Integers

IMAGE = 1
VIDEO = 2  # of mm_token_type_ids, where text is 0

PIXELS = "pixel_values"
GRIDS = "image_grid_thw"
SIZES = "image_sizes"
MASK = "pixel_attention_mask"  # of images of several sizes, or of patches, that one tensor holds
IN_DOCUMENT = "batch_num_images"  # LLaVA-OneVision: how many images a document has; a single one is cut into tiles


def image_feature_parameters(model: Any) -> Mapping[str, Parameter]:
    """Return the parameters of `get_image_features` of a model or class by name; ModelError for one without it."""
    if not (parameters := _method_parameters(model, "get_image_features")):
        raise ModelError(f"{_class_name(model)} has no get_image_features, which makes rows of images")
    return parameters


def _method_parameters(model: Any, method: str) -> Mapping[str, Parameter]:
    """By name, of a model or class, or None; none without the method."""
    function = getattr(model, method, None)
    parameters = {} if function is None else signature(function).parameters
    return {name: p for name, p in parameters.items() if name != "self" and p.kind != Parameter.VAR_KEYWORD}


def _class_name(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)


def headless_model_class(config: PreTrainedConfig | None) -> Any:
    """Return the class of the model below the head; None if transformers has none."""
    mapping: Any = MODEL_MAPPING
    return mapping.get(type(config), None)


def compute_rope_positions(
    model: Any, config: PreTrainedConfig | None, ids: Integers, kinds: Integers, **media: Tensor
) -> Integers:
    """Compute positions (3, T) of a document by the model's own `get_rope_index`.

    `model` is the class below the head; `kinds` (T,) are of text, images and videos; `media` are arguments such as
    grids.
    """
    bare = model.__new__(model)  # the method reads the configuration and nothing else of the model
    object.__setattr__(bare, "config", config)
    arguments = {"mm_token_type_ids": torch.from_numpy(kinds)[None].int(), **media}
    positions: Any = bare.get_rope_index(torch.from_numpy(ids)[None], **arguments)
    return positions[0][:, 0].numpy()


def mark_placeholders(ids: Integers, placeholder: int, rows: Sequence[int], media: str) -> Integers:
    """Mark tokens (T,) that are this placeholder by 1, others by 0.

    DataError if its runs do not have the lengths `rows`.
    """
    kinds = (ids == placeholder).astype(np.int64)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], kinds, [0]])))  # start, end, start, end … of runs
    runs = (edges[1::2] - edges[::2]).tolist()
    if runs != list(rows):
        raise DataError(
            f"the document has {plural(len(runs), 'run')} of placeholders (token id {placeholder}) of {runs[:8]} "
            f"tokens, its {media} make {list(rows)[:8]} rows; positions are counted by run: put the placeholders of "
            "each between tokens of text, as the model's processor does"
        )
    return kinds


Grid = tuple[int, int, int]
_MERGES = ("spatial_merge_size", "merge_size", "merge_kernel_size")


@dataclass(frozen=True)
class ImageInput:
    """One image as the model folder's own image processor makes it: what `read(index)` gives and an encoder takes.

    `pixels` are (patches, C · t · p²) with a `grid` (t, h, w) of patches (Qwen), or without one (n, 3, H, W), n being
    the tiles of the image (LLaVA: 1). `size` is the image's own height and width in models that ask for `image_sizes`
    (Mistral 3: of its pixels; LLaVA-NeXT: before it was cut into tiles). `fields` are further arguments of the model's
    `get_image_features` by name, as its processor makes them of only this image: a `pixel_attention_mask` (n, H, W) of
    tiles (Idefics), or `spatial_shapes` (n, 2) (LFM2-VL).
    """

    pixels: Tensor
    grid: Grid | None = None
    size: tuple[int, int] | None = None
    fields: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class ImageTokens:
    """Images in the ids and positions of a vision-language model; only integers, from its configuration.

    `placeholder` is the token id that rows of images replace (image_token_id). `merge`² patches, `merge` a side, become
    one row: a grid (t, h, w) of patches makes t · h · w / merge² rows. Models without grids make `fixed_rows` for every
    image. `unknown` is the reason why the configuration does not determine the rows: then the processor's placeholders
    count them.
    """

    placeholder: int
    merge: int = 1
    fixed_rows: int | None = None
    config: PreTrainedConfig | None = field(default=None, repr=False, compare=False)
    unknown: str = field(default="", compare=False)

    @property
    def has_grids(self) -> bool:
        """Whether the rows of an image depend on its grid of patches."""
        return self.fixed_rows is None and not self.unknown

    def rows(self, grid: Grid | None) -> int:
        """Return the rows, and placeholders, of one image.

        DataError where the configuration does not tell, or merge, them.
        """
        if self.fixed_rows is not None:
            return self.fixed_rows
        if self.unknown:
            raise DataError(
                f"how many rows an image has is not said by {type(self.config).__name__} ({self.unknown}); in a loop "
                "of your own count the placeholders that its processor makes (longspan train does not do so)"
            )
        if (
            grid is None
            or len(grid) != 3
            or any(side < 1 for side in grid)
            or any(s % self.merge for s in grid[1:])
        ):
            raise DataError(
                f"an image has the grid of patches {grid}; give (t, h, w), h and w multiples of {self.merge} "
                "(spatial_merge_size), as the model folder's own image processor makes them"
            )
        return int(np.prod(grid)) // self.merge**2

    def positions(self, ids: npt.NDArray[Any], grids: npt.NDArray[Any]) -> npt.NDArray[np.int64] | None:
        """Compute the positions (3, T) of a whole document, ids (T,) and grids (images, 3); None if they are plain.

        DataError where `kinds` raises it, and if two images have no text between them.
        """
        model = headless_model_class(self.config)
        if model is None or not hasattr(model, "get_rope_index") or not len(grids):
            return None
        ids = np.asarray(ids, dtype=np.int64)
        grids = np.asarray(grids, dtype=np.int64)
        kinds = self.kinds(ids, grids)
        return compute_rope_positions(model, self.config, ids, kinds, image_grid_thw=torch.from_numpy(grids))

    def kinds(self, ids: npt.NDArray[np.int64], grids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the kind of each token (T,): text 0, image 1.

        DataError if runs of placeholders do not fit the grids.
        """
        rows = [self.rows(tuple(grid)) for grid in grids.tolist()]
        return IMAGE * mark_placeholders(ids, self.placeholder, rows, plural(len(rows), "image"))


def image_tokens(config: PreTrainedConfig) -> ImageTokens:
    """Read what a model of this configuration takes for images. Raises ModelError for one that has no images.

    >>> image_tokens(AutoConfig.from_pretrained("Qwen3-VL-8B")).rows((1, 4, 6))  # doctest: +SKIP
    6
    """
    placeholder = getattr(config, "image_token_id", None)
    placeholder = getattr(config, "image_token_index", None) if placeholder is None else placeholder
    vision = getattr(config, "vision_config", None)
    if not isinstance(placeholder, int) or vision is None:
        raise ModelError(
            f"{type(config).__name__} has no image_token_id and vision_config, so it says nothing of images; use the "
            "configuration of a model from images and text to text"
        )
    merges = [getattr(some_config, name, None) for some_config in (vision, config) for name in _MERGES]
    merge = next((value for value in merges if value is not None), None)
    parameters = _method_parameters(headless_model_class(config), "get_image_features")
    if GRIDS in parameters and merge is not None:
        return ImageTokens(placeholder, merge[0] if isinstance(merge, list | tuple) else merge, config=config)
    if SIZES in parameters and parameters[SIZES].default is Parameter.empty:
        return ImageTokens(placeholder, config=config, unknown="they depend on its size")
    try:
        return ImageTokens(placeholder, fixed_rows=_count_fixed_rows(config, vision), config=config)
    except ModelError as error:
        return ImageTokens(placeholder, config=config, unknown=str(error))


def _count_fixed_rows(config: PreTrainedConfig, vision: PreTrainedConfig) -> int:
    """By running the model's own code on the meta device."""
    size: Any = getattr(vision, "image_size", None)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    name = type(config).__name__
    if not isinstance(height, int) or not isinstance(width, int):
        raise ModelError(f"{name}: its vision_config has no image_size, so rows of an image are not known")
    try:
        with torch.device("meta"), torch.no_grad():
            model: Any = AutoModel.from_config(config, trust_remote_code=False)
            model.to(torch.float32)
            pixels = torch.zeros(1, getattr(vision, "num_channels", 3), height, width).to(next(model.parameters()))
            return len(model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output[0])
    except Exception as error:  # whatever a model's own code raises
        raise ModelError(
            f"{name}: get_image_features of one image of {height} x {width} pixels raised {type(error).__name__}: "
            f"{error}; so its rows are not known"
        ) from error


# ---- videos

# Each group of frames of a video (a temporal patch) is an item, with a grid (1, h, w) of patches. Towers of models with
# such videos attend only inside a group, so that the groups of one video may be encoded by several ranks.


_PIXELS = "pixel_values_videos"
_GRIDS = "video_grid_thw"
_SECONDS = "second_per_grid_ts"


class Video(NamedTuple):
    """A video by its `grid` (t, h, w) of patches: t groups of frames, `seconds` from one group to the next.

    Only Qwen2.5-VL computes positions from `seconds`; Qwen3-VL writes the times of groups as text between them.
    """

    grid: Grid
    seconds: float = 1.0


@dataclass(frozen=True)
class VideoTokens:
    """Videos in the ids and positions of a vision-language model; only integers, from its configuration.

    `placeholder` is the token id that rows of videos replace (video_token_id). If `apart`, the model expects text
    between the groups of frames of a video; otherwise the rows of a video are one run.
    """

    images: ImageTokens
    placeholder: int
    apart: bool

    @classmethod
    def from_configuration(cls, config: PreTrainedConfig) -> "VideoTokens":
        """Read what a configuration takes for videos; ModelError where it takes none by grids, or lacks the id."""
        images = image_tokens(config)
        model = headless_model_class(config)
        placeholder = getattr(config, "video_token_id", None)
        takes_features = {_PIXELS, _GRIDS} <= _method_parameters(model, "get_video_features").keys()
        takes_grids = {_GRIDS, "mm_token_type_ids"} <= _method_parameters(model, "get_rope_index").keys()
        if not isinstance(placeholder, int) or not takes_features or not takes_grids:
            raise ModelError(
                f"{type(config).__name__} is not of a model that takes videos by a video_token_id, {_PIXELS} and "
                f"{_GRIDS}; give frames as images"
            )
        if placeholder >= (known_ids := config.get_text_config().vocab_size):
            raise ModelError(
                f"placeholders of videos are token id {placeholder}, and {type(config).__name__} has {known_ids} ids "
                "(vocab_size); set video_token_id in config.json to an id of the vocabulary, as the tokenizer has it"
            )
        return cls(images, placeholder, _frame_groups_are_apart(model, images, placeholder))

    def rows(self, grid: Grid) -> list[int]:
        """Return the rows of each group of frames of a video.

        Raises DataError for a grid that the model does not merge.

        >>> video_tokens(AutoConfig.from_pretrained("Qwen3-VL-8B")).rows((3, 4, 6))  # doctest: +SKIP
        [6, 6, 6]
        """
        groups, height, width = grid
        return [self.images.rows((1, height, width))] * groups

    def inputs(self, pixels: Tensor, grid: Grid) -> list[ImageInput]:
        """Cut pixel_values_videos (t · h · w, C · frames · p²) into an input for each group of frames.

        DataError if unequal.
        """
        groups, height, width = grid
        if len(pixels) != groups * height * width:
            raise DataError(
                f"a video has {len(pixels)} patches and the grid {grid}, which is of {groups * height * width}; give "
                f"the rows of {_PIXELS} of this video alone"
            )
        return [ImageInput(group_pixels, (1, height, width)) for group_pixels in pixels.chunk(groups)]

    def positions(
        self, ids: npt.NDArray[Any], grids: npt.NDArray[Any], videos: Sequence[Video]
    ) -> npt.NDArray[np.int64] | None:
        """Compute the positions (3, T) of ids (T,), with grids (images, 3) of its images, and its videos.

        None if plain.
        """
        if not videos:
            return self.images.positions(ids, grids)
        ids = np.asarray(ids, dtype=np.int64)
        grids = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
        rows = [counts if self.apart else [sum(counts)] for counts in (self.rows(video.grid) for video in videos)]
        in_videos = mark_placeholders(
            ids, self.placeholder, [n for counts in rows for n in counts], plural(len(videos), "video")
        )
        config = self.images.config
        model = headless_model_class(config)
        media = {_GRIDS: torch.tensor([video.grid for video in videos])}
        if len(grids):
            media[GRIDS] = torch.from_numpy(grids)
        if _SECONDS in _method_parameters(model, "get_rope_index"):  # of float32, as processors give them
            media[_SECONDS] = torch.tensor([video.seconds for video in videos], dtype=torch.float32)
        return compute_rope_positions(
            model, config, ids, self.images.kinds(ids, grids) + VIDEO * in_videos, **media
        )


def _frame_groups_are_apart(model: Any, images: ImageTokens, placeholder: int) -> bool:
    """Tried with two groups of two rows as one run: a model that wants text makes positions for too few tokens."""
    ids = np.array([placeholder] * 4)
    side = images.merge
    grids = {_GRIDS: torch.tensor([[2, side, 2 * side]])}
    try:
        compute_rope_positions(model, images.config, ids, np.array([VIDEO] * 4), **grids)
    except RuntimeError:  # positions of the first group only, which do not fill four tokens
        return True
    return False


def check_image_arguments(model: Any, names: Collection[str]) -> None:
    """Raise DataError unless a model, or class, takes these arguments for its images and asks for no others."""
    parameters = image_feature_parameters(model)
    if unknown := [name for name in names if name not in parameters]:
        raise DataError(
            f"images have {', '.join(unknown)}, and get_image_features of {_class_name(model)} takes "
            f"{', '.join(parameters)} alone; use the processor of the model's own folder"
        )
    required = [name for name, p in parameters.items() if p.default is Parameter.empty and name not in names]
    if required:
        hints = [_HINTS.get(name, f'fields={{"{name}": …}}') for name in required]
        raise DataError(
            f"{_class_name(model)} makes rows of an image by {', '.join(required)}, which its images lack; give "
            f"ImageInput(pixels, {', '.join(hints)}), as the image processor of the model's folder makes them"
        )


def check_image_arguments_of_config(config: PreTrainedConfig, names: Collection[str]) -> None:
    """Raise DataError unless models of this configuration take these arguments for their images."""
    if (model := headless_model_class(config)) is not None:
        check_image_arguments(model, names)


_HINTS = {SIZES: "size=(height, width)", GRIDS: "grid=(t, h, w)"}


def image_arguments(model: Any, inputs: Sequence[ImageInput], like: Tensor) -> dict[str, Any]:
    """Make the arguments of a model's `get_image_features`, and of its forward pass, for images, in the type of `like`.

    Inputs are joined along the first dim, padded with zeros if sizes or a mask tell. Idefics gets all as one document.
    DataError for images that do not fit each other, or the model.
    """
    names = dict.fromkeys(name for image in inputs for name in image.fields)
    fields = {name: [image.fields[name] for image in inputs if name in image.fields] for name in names}
    arguments: dict[str, Any] = {}
    if any(image.grid is not None for image in inputs):
        arguments[GRIDS] = torch.tensor([image.grid for image in inputs], device=like.device)
    if any(image.size is not None for image in inputs):
        arguments[SIZES] = torch.tensor([image.size for image in inputs], device=like.device)
    check_image_arguments(model, [PIXELS, *arguments, *fields])
    pads = SIZES in arguments or MASK in fields
    for name, parts in ({PIXELS: [image.pixels for image in inputs]} | fields).items():
        if len(parts) != len(inputs):
            raise DataError(f"{len(parts)} of {plural(len(inputs), 'image')} have {name}; give it of each")
        dtypes = [like.dtype if x.is_floating_point() else x.dtype for x in parts]
        parts = [x.to(like.device, dtype, non_blocking=True) for x, dtype in zip(parts, dtypes, strict=True)]
        arguments[name] = _join_images(name, parts, pads=pads)
    # Idefics: (documents, tiles, 3, H, W)
    if MASK in image_feature_parameters(model) and arguments[PIXELS].ndim == 4:
        arguments |= {name: arguments[name][None] for name in (PIXELS, MASK) if name in arguments}
    return arguments


def encoding_order(inputs: Sequence[ImageInput]) -> list[int]:
    """Return the order of images in one call: those alone in their document first, as LLaVA-OneVision needs it."""
    counts = [int(image.fields.get(IN_DOCUMENT, 1)) for image in inputs]  # an only image is cut into tiles
    return sorted(range(len(inputs)), key=lambda i: counts[i] != 1)


def _join_images(name: str, parts: Sequence[Tensor], *, pads: bool) -> Tensor:
    if name == IN_DOCUMENT:
        # An image alone is a document. All others form one of at least two: a single one would be cut into tiles.
        single_images = sum(int(count) == 1 for count in parts)
        others = len(parts) - single_images
        return torch.tensor([1] * single_images + [max(2, others)] * (others > 0))
    if pads:
        parts = _pad_to_largest(parts)
    shapes = {tuple(x.shape[1:]) for x in parts}
    if len(shapes) > 1:
        argument = "pixels" if name == PIXELS else name
        raise DataError(
            f"{plural(len(parts), 'image')} have {argument} of {len(shapes)} shapes ({sorted(shapes)[:3]} after the "
            "first dim); an image processor makes one"
        )
    return torch.cat([*parts])


def _pad_to_largest(parts: Sequence[Tensor]) -> list[Tensor]:
    """With zeros behind, as processors pad images of a call; different numbers of dims are refused later."""
    if len({x.ndim for x in parts}) > 1:
        return list(parts)
    largest_sides = [max(sides) for sides in zip(*(x.shape[1:] for x in parts), strict=True)]
    missing = [[to - side for side, to in zip(x.shape[1:], largest_sides, strict=True)] for x in parts]
    return [
        F.pad(x, [n for count in sides[::-1] for n in (0, count)]) for x, sides in zip(parts, missing, strict=True)
    ]

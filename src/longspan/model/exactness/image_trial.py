"""A trial of what a model does with images: a small model of its class runs on the host, whole and in its two parts.

Images must enter the text model only as rows in the places of their placeholders (DeepStack: after layers too), as
positions, and as rows that see each other: logits and every gradient are compared.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from longspan.attention import SpanMask
from longspan.errors import ModelError
from longspan.model.exactness.image_documents import (
    TOKEN_KINDS,
    TrialDocument,
    make_stock_arguments,
    make_trial_documents,
    make_video_document,
)
from longspan.model.exactness.small_copies import make_tiny_model, shrink_configuration
from longspan.model.exactness.trials import parameter_gradients, relative_error, run_trial_once, trial_error_text
from longspan.model.layers import decoder_layers, text_model
from longspan.model.seams.attention_calls import layer_type
from longspan.model.vision.image_encoder import ImageEncoder, pack_attention, split_off_image_encoder
from longspan.plan.shape.families import find_family

_SIZES = ((9, 3), (7, 0), (6, 1))  # tokens of text and images of each document
# Relative. Trials compute in float64, and exact parts differ by 1e-15; a class may compute in float32 by other ways
# than the casts that trials replace.
_TOLERANCE = 1e-5
# Below this share of the largest gradient a gradient may be rounding alone, as that of a key's bias is.
_FLOOR = 0.01


@dataclass(frozen=True)
class ImageTrial:
    """What a small copy showed: `reasons` against images, and what the rows of an image see of it in layers of each
    type ("" where layers have none); no type is named if they see earlier rows alone.
    """

    reasons: tuple[str, ...]
    spans: Mapping[str, SpanMask]


def try_images(config: PreTrainedConfig, *, videos: bool = False) -> ImageTrial:
    """Try whether images (or videos) enter a model of this configuration as rows and positions only.

    A small copy is tried once for each configuration; that it cannot be made or run is a reason against them too.
    """

    def run() -> ImageTrial:
        spans = dict[str, SpanMask]()
        return ImageTrial(tuple(_image_trial_reasons(config, spans, videos=videos)), spans)

    return run_trial_once(("videos" if videos else "images", type(config), config.to_json_string()), run)


def _image_trial_reasons(config: PreTrainedConfig, spans: dict[str, SpanMask], *, videos: bool) -> Iterator[str]:
    """`spans` is filled. The model is taken apart between the two passes: its encoder leaves it."""
    try:
        model = make_tiny_model(shrink_configuration(config, images=True), torch.float64, images=True).train()
        documents = [make_video_document(model)] if videos else make_trial_documents(model, _SIZES)
        if not find_family(config.model_type).prefix_rows:
            spans |= _spans_of_layers(model, documents[0])
        whole_parameters = dict(model.named_parameters())
        whole_logits, whole_gradients = _run_documents(
            whole_parameters, documents, lambda d: model(**make_stock_arguments(model, d)).logits[0]
        )
        encoder = split_off_image_encoder(model)
        pack_attention(encoder)
        parameters = dict(model.named_parameters()) | dict(encoder.named_parameters())
        run_parts = partial(_logits_from_parts, model, encoder, bool(spans))
        logits, gradients = _run_documents(parameters, documents, run_parts)
    except ModelError as error:
        yield str(error)
        return
    except Exception as error:
        yield f"a small model that shows what it does with images cannot be run on the host ({trial_error_text(error)})"
        return
    evidence = "(found with a small model of its class, whole and in parts)"
    largest_error = max(relative_error(result, exact) for result, exact in zip(logits, whole_logits, strict=True))
    if largest_error > _TOLERANCE:
        yield (
            "it does more with images than put their rows in the places of their placeholders: logits differ by "
            f"{largest_error:.1e} {evidence}"
        )
        return
    largest = max(float(g.abs().max()) for g in whole_gradients.values() if g is not None)
    for name, whole_gradient in whole_gradients.items():
        pair = whole_gradient, gradients.get(name)
        exact, gradient = (torch.zeros(1) if g is None else g for g in pair)  # None counts as zeros
        if (error := relative_error(gradient, exact, least=_FLOOR * largest)) > _TOLERANCE:
            yield f"the gradient of {name} is another where rows of images are made apart: by {error:.1e} {evidence}"
            return


def _run_documents(
    parameters: dict[str, nn.Parameter], documents: list[TrialDocument], run: Callable[[Any], Tensor]
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Logits are (T, V). Backward is from a random weighting of all of them that is the same for each `run`."""
    logits = [run(document) for document in documents]
    generator = torch.Generator().manual_seed(0)
    weighed = [(x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in logits]
    gradients = parameter_gradients(torch.stack(weighed).sum(), parameters.items())
    return [x.detach() for x in logits], gradients


# ---- which rows of an image see each other, by the masks that the class makes

_RECORDING = "longspan_recorded_masks"
# Windows are so narrow while masks are recorded: shorter than the rows of any image.
_NARROW = 2


@dataclass(eq=False)
class _RecordedMasks:
    """The masks of the running model's layers, by type of layer; empty where none runs."""

    by_type: dict[str, Tensor | None] = field(default_factory=dict[str, Tensor | None])

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        """Stand in for transformers' attention over `sdpa`."""
        self.by_type[layer_type(module)] = mask
        return sdpa_attention_forward(module, q, k, v, mask, **options)


_recorded = _RecordedMasks()
AttentionInterface.register(_RECORDING, _recorded.attend)
AttentionMaskInterface.register(_RECORDING, sdpa_mask)


def _spans_of_layers(model: PreTrainedModel, document: TrialDocument) -> dict[str, SpanMask]:
    """What the rows of the longest image see of it, by type of layer; {} if they see earlier rows alone everywhere."""
    edges = np.diff(document.at_images.astype(int), prepend=0, append=0)
    starts, stops = (np.flatnonzero(edges == edge).tolist() for edge in (1, -1))
    first, stop = max(zip(starts, stops, strict=True), key=lambda run: run[1] - run[0])
    _recorded.by_type.clear()
    with _record_masks(model), torch.no_grad():
        model(**make_stock_arguments(model, document))
    spans = dict[str, SpanMask]()
    for kind, mask in _recorded.by_type.items():
        spans[kind] = "none"
        if mask is not None and mask[0, 0, first, stop - 1]:
            spans[kind] = "whole" if mask[0, 0, stop - 1, first] else "later"
    return spans if {*spans.values()} != {"none"} else {}


@contextmanager
def _record_masks(model: PreTrainedModel) -> Iterator[None]:
    """Have the text model attend by the function that records masks, under narrow windows."""
    texts = (model.config.get_text_config(), text_model(model).config)
    values = [(text, name) for text in texts for name in ("_attn_implementation", "sliding_window")]
    before = [(text, name, getattr(text, name, None)) for text, name in values]
    for text in texts:
        text._attn_implementation = _RECORDING
        if getattr(text, "sliding_window", None):
            text.sliding_window = _NARROW
    try:
        yield
    finally:
        for text, name, value in before:
            if value is not None:
                setattr(text, name, value)


def _logits_from_parts(
    model: PreTrainedModel, encoder: ImageEncoder, with_spans: bool, document: TrialDocument
) -> Tensor:
    """Rows of images replace placeholders by hooks on the embedding, and are added after layers (DeepStack)."""
    ids = torch.from_numpy(document.ids)[None]
    placeholders = torch.from_numpy(document.at_images.nonzero()[0])
    encoded = [encoder([image]) for image in document.images]
    embedding: Any = model.get_input_embeddings()
    # An encoder's rows have side by side the part of the embedding, then those of the first layers.
    row_parts = torch.cat(encoded).split(embedding.weight.shape[1], -1) if encoded else ()
    positions = torch.arange(ids.shape[1])[None]
    if document.positions is not None:
        positions = torch.from_numpy(document.positions)[:, None]
    parameters = signature(model.forward).parameters
    # In place of a shard's spans, the stock mask gets kinds of tokens: rows of an image or a prefix see each other.
    token_kinds = document.kinds(model, images=with_spans)
    kinds = dict.fromkeys((name for name in TOKEN_KINDS if name in parameters), token_kinds)

    def replace_rows(_: Any, __: Any, out: Tensor) -> Tensor:
        return out.index_copy(1, placeholders, row_parts[0][None]) if row_parts else out

    def add_part(part: Tensor, _: Any, __: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (out[0].index_add(1, placeholders, part[None]), *out[1:])
        return out.index_add(1, placeholders, part[None])

    with ExitStack() as hooks:
        hooks.callback(embedding.register_forward_hook(replace_rows).remove)
        for layer, part in zip(decoder_layers(model).values(), row_parts[1:], strict=False):
            hooks.callback(layer.register_forward_hook(partial(add_part, part)).remove)
        return model(input_ids=ids, position_ids=positions, use_cache=False, **kinds).logits[0]

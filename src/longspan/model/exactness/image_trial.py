"""A trial of what a model does with images: a small model of its class runs on the host, whole and in its two parts.

Images must enter the text model only as rows in the places of their placeholders (DeepStack: after layers too) and as
positions. So the unchanged model is compared, in logits and every gradient, with its text model given rows of each
image encoded by itself. The text model is tried as any other (`check_model.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.errors import ModelError
from longspan.model.exactness.small_copies import (
    make_tiny_model,
    parameter_gradients,
    relative_error,
    shrink_configuration,
    trial_error,
    try_once,
)
from longspan.model.exactness.trial_documents import (
    TOKEN_KINDS,
    TrialDocument,
    make_stock_arguments,
    make_trial_documents,
    make_video_document,
)
from longspan.model.layers import decoder_layers
from longspan.model.vision.image_encoder import VisionParts, pack_attention, split_model
from longspan.model.vision.image_tokens import VideoTokens
from longspan.plan.shape.model_shape import SEEN_BY_IMAGES

_SIZES = ((9, 3), (7, 0), (6, 1))  # tokens of text and images of each document
_TOLERANCE = 1e-5  # relative; many norms and the softmax compute in float32, whatever the model's type
_FLOOR = 0.01  # of the largest gradient: below, a gradient may be rounding alone, as that of a key's bias is


def image_reasons(config: PreTrainedConfig, *, videos: bool = False) -> tuple[str, ...]:
    """Return why images do not enter a model of this configuration as rows and positions only; empty if they do.

    A small copy is tried once for each configuration. If it cannot be made or run, that is a reason too. With `videos`
    the same of videos, of which each group of frames is an item as an image is; only for a model without reasons
    against images.
    """
    key = "videos" if videos else "images", type(config), config.to_json_string()
    return try_once(key, lambda: tuple(_differences(config, videos=videos)))


def video_tokens(config: PreTrainedConfig) -> VideoTokens:
    """Return what a model of this configuration takes for videos, whose groups of frames are items as images are.

    Once for each configuration a small copy of the model is given videos, whole and as items. Raises ModelError where
    the two differ, and for a model without videos.

    >>> video_tokens(AutoConfig.from_pretrained("Qwen3-VL-8B")).rows((3, 4, 6))  # doctest: +SKIP
    [6, 6, 6]
    """
    tokens = VideoTokens.of(config)
    if reasons := image_reasons(config, videos=True):
        raise ModelError(
            f"{type(config).__name__} ({config.model_type}) cannot be given videos: {'; '.join(reasons)}; give frames "
            "as images"
        )
    return tokens


class _Pass(NamedTuple):
    logits: list[Tensor]
    gradients: dict[str, Tensor | None]


def _differences(config: PreTrainedConfig, *, videos: bool) -> Iterator[str]:
    try:
        model = make_tiny_model(shrink_configuration(config, images=True), torch.float64, images=True).train()
        documents = [make_video_document(model)] if videos else make_trial_documents(model, _SIZES)
        named = dict(model.named_parameters())
        whole = _make_pass(named, documents, lambda d: model(**make_stock_arguments(model, d)).logits[0])
        parts = split_model(model)
        pack_attention(parts.encoder)
        named = dict(parts.language_model.named_parameters()) | dict(parts.encoder.named_parameters())
        apart = _make_pass(named, documents, partial(_part_logits, parts))
    except ModelError as error:
        yield str(error)
        return
    except Exception as error:
        yield f"a small model that shows what it does with images cannot be run on the host ({trial_error(error)})"
        return
    evidence = "(found with a small model of its class, whole and in parts)"
    error = max(relative_error(a, b) for a, b in zip(apart.logits, whole.logits, strict=True))
    if error > _TOLERANCE:
        yield (
            "it does more with images than put their rows in the places of their placeholders: logits differ by "
            f"{error:.1e} {evidence}"
        )
        return
    largest = max(float(g.abs().max()) for g in whole.gradients.values() if g is not None)
    for name, exact in whole.gradients.items():
        gradient = apart.gradients.get(name)
        exact, gradient = (torch.zeros(1) if g is None else g for g in (exact, gradient))  # None counts as zeros
        if (error := relative_error(gradient, exact, least=_FLOOR * largest)) > _TOLERANCE:
            yield f"the gradient of {name} is another where rows of images are made apart: by {error:.1e} {evidence}"
            return


def _make_pass(
    parameters: dict[str, nn.Parameter], documents: list[TrialDocument], run: Callable[[Any], Tensor]
) -> _Pass:
    logits = [run(document) for document in documents]
    draw = torch.Generator().manual_seed(0)
    weighed = [(x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in logits]
    return _Pass([x.detach() for x in logits], parameter_gradients(torch.stack(weighed).sum(), parameters.items()))


def _part_logits(parts: VisionParts, document: TrialDocument) -> Tensor:
    """Logits (T, V) of the text model from ids, positions and the rows of each image, encoded one at a time."""
    model, ids = parts.language_model, torch.from_numpy(document.ids)[None]
    placeholders = torch.from_numpy(document.at_images.nonzero()[0])
    encoded = [parts.encoder([image]) for image in document.images]
    embedding: Any = model.get_input_embeddings()
    rows = torch.cat(encoded).split(embedding.weight.shape[1], -1) if encoded else ()
    positions = torch.arange(ids.shape[1])[None]
    if document.positions is not None:
        positions = torch.from_numpy(document.positions)[:, None]
    parameters = signature(model.forward).parameters
    # In place of a shard's spans, the stock mask gets kinds of tokens: rows of an image or a prefix see each other.
    token_kinds = document.kinds(model, images=model.config.model_type in SEEN_BY_IMAGES)
    kinds = dict.fromkeys((name for name in TOKEN_KINDS if name in parameters), token_kinds)
    with ExitStack() as hooks:
        if rows:
            _hook_image_rows(model, placeholders, rows, hooks)
        return model(input_ids=ids, position_ids=positions, use_cache=False, **kinds).logits[0]


def _hook_image_rows(model: PreTrainedModel, places: Tensor, rows: tuple[Tensor, ...], hooks: ExitStack) -> None:
    """`rows[0]` (R, D) take the place of the embedding's; the first layers add the further ones (DeepStack)."""

    def add_part(part: Tensor, _: Any, __: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (out[0].index_add(1, places, part[None]), *out[1:])
        return out.index_add(1, places, part[None])

    embedding = model.get_input_embeddings()
    replace_rows = embedding.register_forward_hook(lambda _, __, out: out.index_copy(1, places, rows[0][None]))
    hooks.callback(replace_rows.remove)
    for layer, part in zip(decoder_layers(model).values(), rows[1:], strict=False):
        hooks.callback(layer.register_forward_hook(partial(add_part, part)).remove)

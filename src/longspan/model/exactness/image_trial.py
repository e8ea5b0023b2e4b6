"""A trial of what a model does with images: a small model of its class runs on the host, whole and in its two parts.

Images must enter the text model only as rows in the places of their placeholders (DeepStack: after layers too) and as
positions: logits and every gradient are compared.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

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
from longspan.model.layers import decoder_layers
from longspan.model.vision.image_encoder import ImageEncoder, pack_attention, split_off_image_encoder
from longspan.plan.shape.families import find_family

_SIZES = ((9, 3), (7, 0), (6, 1))  # tokens of text and images of each document
# Relative. Trials compute in float64, and exact parts differ by 1e-15; a class may compute in float32 by other ways
# than the casts that trials replace.
_TOLERANCE = 1e-5
# Below this share of the largest gradient a gradient may be rounding alone, as that of a key's bias is.
_FLOOR = 0.01


def reasons_against_images(config: PreTrainedConfig, *, videos: bool = False) -> tuple[str, ...]:
    """Return why images (or videos) do not enter a model of this configuration as rows and positions only.

    A small copy is tried once for each configuration; that it cannot be made or run is a reason too.
    """
    key = "videos" if videos else "images", type(config), config.to_json_string()
    return run_trial_once(key, lambda: tuple(_image_trial_reasons(config, videos=videos)))


def _image_trial_reasons(config: PreTrainedConfig, *, videos: bool) -> Iterator[str]:
    """The model is taken apart between the two passes: its encoder leaves it."""
    try:
        model = make_tiny_model(shrink_configuration(config, images=True), torch.float64, images=True).train()
        documents = [make_video_document(model)] if videos else make_trial_documents(model, _SIZES)
        whole_parameters = dict(model.named_parameters())
        whole_logits, whole_gradients = _run_documents(
            whole_parameters, documents, lambda d: model(**make_stock_arguments(model, d)).logits[0]
        )
        encoder = split_off_image_encoder(model)
        pack_attention(encoder)
        parameters = dict(model.named_parameters()) | dict(encoder.named_parameters())
        logits, gradients = _run_documents(parameters, documents, partial(_logits_from_parts, model, encoder))
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


def _logits_from_parts(model: PreTrainedModel, encoder: ImageEncoder, document: TrialDocument) -> Tensor:
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
    token_kinds = document.kinds(model, images=find_family(model.config.model_type).images_see_each_other)
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

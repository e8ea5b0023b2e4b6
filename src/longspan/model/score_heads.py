"""Heads that score: classifiers of transformers over decoders, and `add_score_head` for families that have none.

A prepared classifier makes the scores (L,) of every row; which rows count is the documents' affair (`ScoredDocument`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import TokenClassifierOutput

from longspan.errors import ModelError
from longspan.model.feature import Feature
from longspan.model.kinds import SCORE_HEADS
from longspan.model.layers import architecture_name, base_model, base_model_name
from longspan.model.weights.drawn_weights import DrawnWeights
from longspan.model.weights.fill import JoinedWeights, fill_when_prepared, find_deferred_weights

_MAPPINGS: tuple[tuple[Any, Any], ...] = (
    (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, GenericForSequenceClassification),
    (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, GenericForTokenClassification),
)


def find_score_head(model: Any) -> Any:
    """Return the linear over hidden states, as decoders' classes call it; None for other heads, such as a pooler's."""
    classifies_tokens = any(kind.__name__.endswith(SCORE_HEADS[1]) for kind in model.__class__.__mro__)
    # a sequence classifier may have a `classifier` too, which reads an encoder's first token
    names = ("score", "classifier") if classifies_tokens else ("score",)
    return next((child for name in names if isinstance(child := getattr(model, name, None), nn.Module)), None)


class _ScoresOfRows:
    """Mixed in before a stock class of transformers: its forward gives the scores of all rows, not of chosen ones."""

    makes_scores = True

    def get_output_embeddings(self) -> Any:
        """Return the head that scores, which is what `prepare` looks for at the end of a model."""
        return find_score_head(self)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> TokenClassifierOutput:
        """Return the scores (1, T, labels) of all rows, as `logits`."""
        model: Any = self
        base = getattr(model, model.base_model_prefix)
        hidden = base(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs).last_hidden_state
        hidden = model.dropout(hidden) if isinstance(getattr(model, "dropout", None), nn.Module) else hidden
        return TokenClassifierOutput(logits=find_score_head(model)(hidden))


@cache
def _class_with_row_scores(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """By the stock class's name and module transformers finds sources and a saved folder its class."""
    return type(stock.__name__, (_ScoresOfRows, stock), {"__module__": stock.__module__})


class ScoreHeadFeature(Feature):
    """A classifier, which gets the forward of all rows' scores."""

    @contextmanager
    def checks_context(self, model: PreTrainedModel) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Give a classifier that forward, and take it back where the model is refused inside.

        Raises ModelError for a class with a forward of its own, which may do more than that.
        """
        stock: Any = type(model)
        if (
            not isinstance(model, PreTrainedModel)
            or getattr(model.config, "is_encoder_decoder", False)
            or base_model(model) is model
            or not find_score_head(model)
        ):
            yield  # refused inside, with the reason
            return
        owner = next(kind for kind in stock.__mro__ if "forward" in vars(kind))
        if not owner.__module__.startswith("transformers."):
            raise ModelError(
                f"{stock.__name__} has a forward of its own ({owner.__module__}), and a step makes the scores of rows "
                "by its base model and its head alone; do the rest in the base model, or in a hook on one of its "
                "modules"
            )
        model.__class__ = _class_with_row_scores(stock)
        try:
            yield
        except BaseException:
            model.__class__ = stock
            raise


def score_class(config: PreTrainedConfig, kind: str = SCORE_HEADS[0]) -> type[PreTrainedModel]:
    """Return transformers' class of this configuration with a head that scores, or one made as transformers makes them.

    >>> model = score_class(config, "ForTokenClassification").from_pretrained(folder)

    Raises ModelError for another kind, and for a configuration without a causal language model.
    """
    if kind not in SCORE_HEADS:
        raise ModelError(f"a head that scores is {kind!r}; use {' or '.join(SCORE_HEADS)}")
    mapping, generic = _MAPPINGS[SCORE_HEADS.index(kind)]
    if type(config) in mapping:
        return mapping[type(config)]
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in causal:
        raise ModelError(
            f"{type(config).__name__} stands for no causal language model, over which a head could score"
        )
    return _make_score_class(causal[type(config)], generic, kind)


@cache
def _make_score_class(causal: type[PreTrainedModel], generic: Any, kind: str) -> type[PreTrainedModel]:
    family_base = next(cls for cls in causal.__mro__ if cls.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + kind
    prefix = {"base_model_prefix": "model", "__module__": causal.__module__}
    return type(name, (generic, family_base), prefix)


def add_score_head(
    model: PreTrainedModel, labels: int = 1, *, tokens: bool = False, seed: int = 0
) -> PreTrainedModel:
    """Return a model with a new head of `labels` scores over a causal language model's base, for `prepare`.

    >>> model = prepare(add_score_head(load_model("Qwen3.5-35B-A3B"), labels=1), world)

    Its class is the family's own ForSequenceClassification, or with `tokens` ForTokenClassification (whose head has a
    bias); where transformers has none, one is made in the same way, which `load_model` finds again. The head is drawn
    from a normal distribution (`initializer_range`) by `seed`. The base model, with its weights, is shared with the
    given model, and gets the new one's configuration; the given model's own head is dropped. If `prepare` fills the
    given model (sharded=True), it fills the head too. Raises ModelError for a model that is prepared, or no causal one.
    """
    config = deepcopy(model.config)
    config.num_labels = labels
    kind: Any = score_class(config, SCORE_HEADS[tokens])
    with torch.device("meta"):
        scored = kind(config)
    base = base_model(model)
    deferred = find_deferred_weights(model)
    # the base would be under a name that the source of its weights does not have
    moved = deferred is not None and base_model_name(model) != scored.base_model_prefix
    if not base_model_name(model) or type(base_model(scored)) is not type(base) or moved:
        raise ModelError(
            f"{architecture_name(model)} keeps a {type(base).__name__} below its head, and {kind.__name__} a "
            f"{type(base_model(scored)).__name__}; give an AutoModelForCausalLM of this configuration"
        )
    setattr(scored, scored.base_model_prefix, base)
    # All modules have one configuration, which `prepare` changes.
    for module in base.modules():
        if getattr(module, "config", None) is model.config:
            module.config = scored.config
    head = find_score_head(scored)
    drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
    spread = getattr(config.get_text_config(), "initializer_range", None) or 0.02
    values = {"weight": (drawn * spread).to(model.dtype)}
    if head.bias is not None:
        values["bias"] = torch.zeros(labels, dtype=model.dtype)
    for name, value in values.items():
        setattr(head, name, nn.Parameter(value if deferred is None else value.to("meta")))
    if deferred is not None:
        (path,) = (name for name, module in scored.named_modules() if module is head)
        added = DrawnWeights({f"{path}.{name}": value for name, value in values.items()})
        fill_when_prepared(scored, JoinedWeights(deferred.source, added))
    if isinstance(getattr(scored, "dropout", None), nn.Dropout):
        # A token classifier's dropout is 0.1 by default, and training over slots would draw it anew.
        scored.dropout.p = 0.0
    return scored.train(model.training)

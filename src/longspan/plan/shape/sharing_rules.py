"""What a model says of documents that share prefixes: reasons against it, and lengths that have other frequencies."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import ModelShape
from longspan.plan.shape.positions import LengthLimit, has_no_positions

# The rates of dropout of attention weights in configurations of transformers.
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class SharingRules(NamedTuple):
    """`against`: in words, what a model computes that is exact for separate documents alone. `length_limits`: the
    lengths of documents at which its rotary frequencies change; only documents with the same ones share a prefix.
    """

    against: tuple[str, ...] = ()
    length_limits: tuple[LengthLimit, ...] = ()

    def with_other(self, other: "SharingRules") -> "SharingRules":
        """Return the rules of documents that another model reads too."""
        against = dict.fromkeys((*self.against, *other.against))
        return SharingRules(tuple(against), tuple(sorted({*self.length_limits, *other.length_limits})))


def read_sharing_rules(config: Any) -> SharingRules:
    """Return the rules that a configuration gives for training, in the words of a prepared model's `CallRules`.

    `config` is a configuration of transformers, object or dict, a config.json or its folder. What classes draw or
    choose without a key of the configuration is not seen.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> read_sharing_rules({"model_type": "llama", "vocab_size": 100, **sizes, "attention_dropout": 0.1}).against
    ('dropout of attention weights',)
    """
    reader = ConfigReader.read_language_model(config)
    shape = ModelShape.of(config)
    has = {
        "keys that an indexer chooses": any(row.indexers for row in shape.choosing),
        "chunks of positions that see each other": shape.chunk_layers > 0,
        "entries made of windows of rows": any(row.choice.form == "entries" for row in shape.choosing),
        "a bidirectional prefix": reader.family.prefix_rows,
        "dropout of attention weights": bool(reader.value(*_ATTENTION_DROPOUT)),
    }
    limits = () if has_no_positions(config) else tuple(sorted(_length_limits(reader)))
    return SharingRules(tuple(name for name, has_it in has.items() if has_it), limits)


def _length_limits(reader: ConfigReader) -> set[LengthLimit]:
    parameters: Any = reader.value("rope_parameters", "rope_scaling")
    if not isinstance(parameters, Mapping):
        return set()
    rope = cast(Mapping[str, Any], parameters)
    by_layer_type = [cast(Mapping[str, Any], value) for value in rope.values() if isinstance(value, Mapping)]
    limits = set[LengthLimit]()
    for values in by_layer_type or [rope]:
        kind = str(values.get("rope_type", values.get("type", "default")))
        trained = reader.count("max_position_embeddings")
        original: Any = values.get("original_max_position_embeddings")
        original = original or reader.value("original_max_position_embeddings") or trained
        if kind == "longrope":
            limits.add(LengthLimit(original, of_each_length=False))
        elif "dynamic" in kind:
            limits.add(LengthLimit(trained, of_each_length=True))
    return limits

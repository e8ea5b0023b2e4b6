"""What a prepared model asks of its calls: its kernel, conditions on rows, and what is not exact for shared prefixes.

`prepare` sets them as the model's `call_rules`, by which a prepared model is known.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError, plural
from longspan.model.layers import decoder_layers, text_model_name
from longspan.plan import MicroBatch
from longspan.plan.shape.positions import LengthLimit, length_class


class PositionTable(NamedTuple):
    """A table of positions: the class of its model, its qualified name there, and how many positions it has."""

    model: str
    name: str
    positions: int


@dataclass(frozen=True)
class CallRules:
    """The kernel of a model's layers, and conditions on its rows.

    Without an `attention_kernel` each call takes the first that can compute it. `random_draws` and
    `draws_in_evaluation` say in words what is drawn outside attention. Rows see each other in both directions inside
    items of the modalities `in_spans`, or inside a `prefix` of at most `prefix_window` rows; the shard must say where
    these are. `separate`, and `separate_in_training`, name what is exact for separate documents alone, not for those
    that share prefixes. `length_limits`: the lengths of documents at which rotary frequencies change.
    """

    architecture: str
    attention_kernel: str | None = None
    position_table: PositionTable | None = None
    random_draws: tuple[str, ...] = ()
    draws_in_evaluation: tuple[str, ...] = ()
    row_multiple: int = 1
    in_spans: tuple[str, ...] = ()
    prefix: bool = False
    prefix_window: int | None = None
    separate: tuple[str, ...] = ()
    separate_in_training: tuple[str, ...] = ()
    length_limits: tuple[LengthLimit, ...] = ()

    def add_kernel_argument(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Put the model's kernel into the keyword arguments of a call, unless the caller chose one."""
        kernel = {} if self.attention_kernel is None else {"attention_kernel": self.attention_kernel}
        return {**kernel, **arguments}

    def separate_features(self, *, training: bool) -> tuple[str, ...]:
        """Return, in words, what the model computes that is not exact where documents share prefixes.

        Rotary frequencies that depend on the length are not among these: `check_shared_prefixes` compares documents.
        """
        spans = ["a bidirectional prefix"] if self.prefix else [f"spans of {name}" for name in self.in_spans]
        return (*self.separate, *spans, *(self.separate_in_training if training else ()))

    def check_shared_prefixes(self, micro_batches: Iterable[MicroBatch], *, training: bool) -> None:
        """Raise ModelError where these micro-batches, whose documents share prefixes, would not be exact.

        The model has `separate_features`, or a document continues one with other rotary frequencies than its own.
        """
        if features := self.separate_features(training=training):
            raise ModelError(
                f"{self.architecture} has {', '.join(features)}, exact for separate documents alone, and documents of "
                "the plan share prefixes; plan the documents before share_prefixes"
            )
        for group in (group for batch in micro_batches for group in batch.groups):
            for index, parent in enumerate(group.parents or ()):
                # The document continues no other.
                if parent < 0:
                    continue
                rows = group.longest_paths[index]
                parent_rows = group.longest_paths[parent]
                if length_class(self.length_limits, rows) != length_class(self.length_limits, parent_rows):
                    raise ModelError(
                        f"document {group.documents[index]} of {plural(rows, 'row')} continues one that others of "
                        f"up to {parent_rows} continue, and {self.architecture} has other rotary frequencies for "
                        "these; call share_prefixes(documents, length_limits=model.call_rules.length_limits), or plan "
                        "the documents before it"
                    )

    def check_shard(self, shard: SequenceShard) -> None:
        """Raise ModelError for a number of rows that sequence parallelism cannot split evenly, and for a shard without
        spans, if rows of this model may see each other.
        """
        if shard.local_rows % self.row_multiple:
            raise ModelError(
                f"the shard holds {shard.local_rows} rows, which sequence parallelism cannot split over tp "
                f"{self.row_multiple}; use shard.with_padding(multiple={self.row_multiple}), and plans with "
                f"row_multiple={self.row_multiple}"
            )
        documents = len(shard.micro_batch.documents)
        span_names = ["a prefix"] if self.prefix else self.in_spans
        if span_names and shard.spans is None and documents:
            raise ModelError(
                f"{self.architecture}: rows of {' and '.join(span_names)} see each other, and the shard of "
                f"{documents} documents says nothing of them; use shard.with_spans(...), with {{}} for text alone"
            )


def find_position_table(model: PreTrainedModel) -> PositionTable | None:
    """Find a table of positions: an embedding or a float buffer of the text model, outside its decoder layers, with
    `max_position_embeddings` rows; None without one.

    The first `offset` rows of an embedding, as OPT's, stand for no position.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    layer_prefixes = tuple(f"{layer}." for layer in decoder_layers(model))
    for name, module in model.get_submodule(text_model_name(model)).named_modules():
        full_name = f"{text_model_name(model)}.{name}".strip(".")
        if full_name.startswith(layer_prefixes) or module is model.get_input_embeddings():
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings - getattr(module, "offset", 0) == positions:
            return PositionTable(type(model).__name__, full_name, positions)
        for buffer, table in module.named_buffers(recurse=False):
            if table.ndim == 2 and table.is_floating_point() and len(table) == positions:
                return PositionTable(type(model).__name__, f"{full_name}.{buffer}", positions)
    return None


def refuse_documents_beyond_positions(
    table: PositionTable, micro_batches: Iterable[MicroBatch], padding_rows: int = 0
) -> None:
    """Raise ModelError if a document, or rows of padding, go beyond a model's table of positions."""
    # (the document in words, how many positions it takes: with its padding, unless documents share prefixes)
    rows_of_documents = [
        (f"document {document} takes {rows} rows" + ("" if rows == length else f" ({length} tokens, padded)"), rows)
        for micro_batch in micro_batches
        for group in micro_batch.groups
        for document, length, rows in zip(
            group.documents,
            group.path_lengths,
            group.laid_out if group.parents is None else group.path_lengths,
            strict=True,
        )
    ]
    for subject, rows in (*rows_of_documents, (f"the shard has {padding_rows} rows of padding", padding_rows)):
        if rows > table.positions:
            raise ModelError(
                f"{subject}, {table.model} knows {table.positions} positions ({table.name}); use documents of at most "
                f"{table.positions} tokens, padding included, or a model with a larger table"
            )


def is_prepared(model: nn.Module) -> bool:
    """Return whether `prepare` has brought this model under a home."""
    return hasattr(model, "call_rules")


def refuse_unprepared_model(model: nn.Module) -> None:
    """Raise ModelError for a transformers model whose attention would take the local rows for the whole sequence."""
    if isinstance(model, PreTrainedModel) and not is_prepared(model):
        raise ModelError(
            f"{type(model).__name__} was not prepared; call model = longspan.prepare(model, world) before it runs"
        )


def call_rules(model: nn.Module) -> CallRules:
    """Return the rules of a prepared model; for a model that is not prepared, rules that refuse nothing."""
    return getattr(model, "call_rules", None) or CallRules(type(model).__name__)

"""What the calls and steps of a prepared model are checked against: a value that `prepare` leaves on the model.

Among it is how many positions a model knows, where it looks them up in a table: learnt, as GPT-2's, or made once, as
CTRL's. Rotary models have no table and are not limited here, whatever `max_position_embeddings` says of their training.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import SequenceShard
from longspan.errors import ModelError
from longspan.model.layers import decoder_layers, text_name
from longspan.plan import MicroBatch


class PositionTable(NamedTuple):
    """A model's table of positions: its qualified name, and how many positions it has."""

    model: str
    name: str
    positions: int


def position_table(model: PreTrainedModel) -> PositionTable | None:
    """The table around the decoder layers, of as many rows as the configuration's `max_position_embeddings`, or None.

    Rows that a module skips at the start of its table (`offset`) are no positions.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    inside = tuple(f"{layer}." for layer in decoder_layers(model))
    for name, module in model.get_submodule(text_name(model)).named_modules():
        full = f"{text_name(model)}.{name}".strip(".")
        if full.startswith(inside) or module is model.get_input_embeddings():
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings - getattr(module, "offset", 0) == positions:
            return PositionTable(type(model).__name__, full, positions)
        for buffer, table in module.named_buffers(recurse=False):
            if table.ndim == 2 and table.is_floating_point() and len(table) == positions:
                return PositionTable(type(model).__name__, f"{full}.{buffer}", positions)
    return None


def refuse_positions(table: PositionTable | None, micro_batches: Iterable[MicroBatch], padding_rows: int = 0) -> None:
    """Raise ModelError where a document, or rows of padding, go beyond a model's table of positions."""
    if table is None:
        return
    laid_out = [
        (f"document {document} takes {rows} rows" + ("" if rows == length else f" ({length} tokens, padded)"), rows)
        for micro_batch in micro_batches
        for group in micro_batch.groups
        for document, length, rows in zip(group.documents, group.lengths, group.laid_out, strict=True)
    ]
    for what, rows in (*laid_out, (f"the shard has {padding_rows} rows of padding", padding_rows)):
        if rows > table.positions:
            raise ModelError(
                f"{what}, {table.model} knows {table.positions} positions ({table.name}); use documents of at most "
                f"{table.positions} tokens, padding included, or a model with a larger table"
            )


@dataclass(frozen=True)
class CallRules:
    """Of a model of this `architecture`: the kernel of its layers, and what its rows must be.

    `attention_kernel` None: each call of attention takes the first kernel that can. A slot's rows must be a multiple of
    `row_multiple`, which is tp under sequence parallelism; `random_draws` are what training would draw at random, and
    `draws_in_evaluation` what is drawn there too. Rows of items of the modalities `in_spans` see each other, or those
    of a `prefix` of each document, so that shards say which rows they are; a prefix has at most `prefix_window` rows,
    where layers have a window.
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

    def with_kernel(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call, and with them the kernel where one was named; a caller's own one wins."""
        kernel = {} if self.attention_kernel is None else {"attention_kernel": self.attention_kernel}
        return {**kernel, **arguments}

    def check_rows(self, shard: SequenceShard) -> None:
        """Raise ModelError for rows that sequence parallelism cannot split."""
        if shard.local_rows % self.row_multiple:
            raise ModelError(
                f"the shard holds {shard.local_rows} rows, which sequence parallelism cannot split over tp "
                f"{self.row_multiple}; use shard.with_padding(multiple={self.row_multiple}), and plans with "
                f"row_multiple={self.row_multiple}"
            )

    def check_spans(self, shard: SequenceShard) -> None:
        """Raise ModelError for a shard that does not say which rows see each other, where some may."""
        documents = len(shard.micro_batch.documents)
        seeing = ["a prefix"] if self.prefix else self.in_spans
        if seeing and shard.spans is None and documents:
            raise ModelError(
                f"{self.architecture}: rows of {' and '.join(seeing)} see each other, and the shard of "
                f"{documents} documents says nothing of them; use shard.with_spans(...), with {{}} for text alone"
            )


def is_prepared(model: nn.Module) -> bool:
    """Whether `prepare` has brought this model under a home."""
    return hasattr(model, "call_rules")


def call_rules(model: nn.Module) -> CallRules:
    """The rules of a prepared model; those of another one refuse nothing."""
    return getattr(model, "call_rules", None) or CallRules(type(model).__name__)

"""Tables of learnt positions around the decoder layers: how long documents may be in a model that has one."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.model.layers import decoder_layers, text_model_name
from longspan.plan import MicroBatch


class PositionTable(NamedTuple):
    """A table of positions: the class of its model, its qualified name there, and how many positions it has."""

    model: str
    name: str
    positions: int


def position_table(model: PreTrainedModel) -> PositionTable | None:
    """Find the table around the decoder layers with `max_position_embeddings` rows (`offset` ones are none)."""
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

"""The entries of a batch as trainers pass it: which of them decide its documents, and the documents."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from longspan.data.batch_documents import BatchDocuments
from longspan.data.document import NO_TARGET
from longspan.errors import DataError
from longspan.train import documents_of

# What trainers pass besides documents, and what means nothing here: nothing is cached, rows are cut by position_ids.
CUTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
IGNORED = (
    *CUTS, "use_cache", "return_dict", "max_length_q", "max_length_k", "logits_to_keep", "num_items_in_batch",
)  # fmt: skip


def document_entries(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch that decide its documents, without those that are None."""
    names = ("input_ids", "labels", "attention_mask", "position_ids", *CUTS)
    return {name: batch[name] for name in names if batch.get(name) is not None}


def counts_of_writes(entries: Mapping[str, Any]) -> tuple[int, ...]:
    """Return how often each tensor was written to."""
    return tuple(getattr(x, "_version", 0) for x in entries.values())


def read_documents_of_batch(batch: Mapping[str, Any]) -> BatchDocuments:
    """Return the documents of a batch as trainers pass it.

    Raises DataError for labels that nothing can predict, and for packed rows without positions.
    """
    if batch.get("position_ids") is None and (cut := [name for name in CUTS if batch.get(name) is not None]):
        raise DataError(
            f"a batch has {', '.join(cut)} and no position_ids; a longspan trainer cuts packed rows where position_ids "
            "begin again at 0: let the collator return them (return_position_ids=True)"
        )
    rows = documents_of({name: value for name, value in batch.items() if name not in IGNORED})
    if batch.get("labels") is None:
        return rows
    labels = torch.as_tensor(batch["labels"])
    for row, start, _ in rows.places:
        if start and labels[row, start] != NO_TARGET:  # a label in column 0 counts nowhere, as labels are shifted
            raise DataError(
                f"the first token of a document, in row {row} at column {start}, has the label {labels[row, start]}: a "
                "Trainer counts it, and nothing predicts it, for before it stands padding or another document; label "
                "it −100, as DataCollatorWithFlattening does"
            )
    return rows


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device; the host waits for no copy to a GPU.

    A batch that is there already is returned itself: callers recognize batches and tensors by identity.
    """
    if isinstance(batch, Tensor):
        if batch.device.type == device.type == "cpu":  # "cpu:0" would be a copy
            return batch
        if batch.device.type != "cpu" or device.type != "cuda":
            return batch.to(device)
        return batch.pin_memory().to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {name: move_to_device(x, device) for name, x in batch.items()}
        return batch if all(moved[name] is x for name, x in batch.items()) else type(batch)(moved)  # pyright: ignore
    return send_to_device(batch, device)

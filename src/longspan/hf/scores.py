"""Batches of a Trainer whose model has a head of scores: logits (B, L), or (B, W, L) of tokens, as in transformers.

The loss is the class's own, or the Trainer's, over a leaf of scores; what it leaves in the leaf's gradient are the
coefficients of one `run_step`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.data.scored_document import ScoredDocument
from longspan.errors import DataError
from longspan.train import BatchDocuments, LossTokens, documents_of
from longspan.train.terms.scores import refuse_other_labels

COEFFICIENT = "coefficient"


class CalledScores(NamedTuple):
    """One batch that the Trainer called the model with: its documents, and the leaf of scores (B, L) or (B, W, L)."""

    rows: BatchDocuments
    leaf: Tensor

    def is_finite(self) -> bool:
        """Return whether the coefficients are finite."""
        return self.leaf.grad is None or bool(self.leaf.grad.isfinite().all())

    def documents_with_coefficients(self) -> list[Any]:
        """Return the documents, each with the derivatives of the loss by its scores, `coefficient_0` to L − 1."""
        gradient = torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad
        slopes = gradient.double().cpu().numpy()
        slopes_of_documents = [
            slopes[row, start:stop].T if slopes.ndim == 3 else slopes[row] for row, start, stop in self.rows.places
        ]
        return [
            document.with_values(**{f"{COEFFICIENT}_{i}": column for i, column in enumerate(columns)})
            for document, columns in zip(self.rows.documents, slopes_of_documents, strict=True)
        ]


def loss_by_coefficients(scores: Tensor, at: LossTokens) -> Tensor:
    """Return the sum of a row's scores times their coefficients."""
    table = scores.reshape(len(at), -1)
    return sum(
        (at[f"{COEFFICIENT}_{i}"] * table[:, i] for i in range(table.shape[1])), start=table.new_zeros(len(at))
    )


def read_scored_batch(batch: Mapping[str, Any], pad: int | None, *, tokens: bool) -> BatchDocuments:
    """Return a batch's documents, one in each row: the last token that is not `pad` is scored, or all with `tokens`.

    Raises DataError for packed rows, rows without tokens, and padding that transformers would take for the last token.
    """
    rows = documents_of(batch)
    ids = torch.as_tensor(batch["input_ids"])
    if [place.row for place in rows.places] != list(range(len(ids))):
        raise DataError(
            f"a batch of {len(ids)} rows has {len(rows.places)} documents; a head of scores reads one in each row: "
            "leave packing and padding_free out, and rows without tokens"
        )
    if not tokens and pad is None and len(ids) > 1:
        raise DataError(
            "the model's configuration has no pad_token_id, by which the row of a document's score is found; set "
            "model.config.pad_token_id, such as to the tokenizer's"
        )
    for row, start, stop in rows.places:
        outside = torch.cat([ids[row, :start], ids[row, stop:]])
        if not tokens and bool((outside != pad).any()):
            raise DataError(
                f"row {row} is padded with token {int(outside[outside != pad][0])}, and the model's pad_token_id is "
                f"{pad}: transformers would score a row of padding; give the collator's tokenizer the same one"
            )
    documents = [
        ScoredDocument(d.ids, rows="all") if tokens else ScoredDocument(d.ids, pad=pad) for d in rows.documents
    ]
    return BatchDocuments(tuple(documents), rows.places, rows.shape)


def stock_loss(model: Any, leaf: Tensor, labels: Any, *, tokens: bool) -> Tensor:
    """Return the loss that the model's class takes of its logits."""
    if tokens:
        return model.loss_function(leaf, labels, model.config)
    count = model.config.num_labels
    problem = model.config.problem_type
    if problem is None and count > 1 and labels.is_floating_point():
        # transformers takes such labels so.
        problem = "multi_label_classification"
    refuse_other_labels(problem, count, 1 if labels.ndim == 1 else labels.shape[1])
    return model.loss_function(logits=leaf, labels=labels, pooled_logits=leaf, config=model.config)

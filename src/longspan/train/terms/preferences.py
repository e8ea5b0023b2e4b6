"""Losses of preferences over documents' sums of log-probabilities, with TRL's figures.

Pairs are documents 2 i, the chosen one, and 2 i + 1; with labels 2 i is an answer, and 2 i + 1 its prompt with the
answer to another, by which the divergence from the reference is estimated: over all documents of a step or evaluation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.config.loss_arguments import loss_arguments
from longspan.config.preference_losses import LOSSES, AnswerPairs, PreferenceLoss
from longspan.config.sections import TrainConfig
from longspan.data.corpus_documents import CorpusDocuments
from longspan.layout import Floats
from longspan.train.rows.read_rows import WEIGHTS
from longspan.train.terms.document_loss import DocumentLoss, LossUnits


def preference_loss(documents: CorpusDocuments, train: TrainConfig) -> DocumentLoss:
    """Return the loss of these documents of a corpus by the keys of [train]; its figures have TRL's names."""
    corpus = documents.corpus
    ids = [*documents.ids]
    loss = LOSSES[train.loss]
    targets = (corpus.lengths - 1 if corpus.targets is None else corpus.targets)[ids].astype(np.float64)
    answer_tokens = targets.copy()
    is_desirable = np.zeros(len(ids) // 2)
    if loss.learns_prompt:
        assert corpus.numbers is not None
        answer_tokens[::2] = [corpus.count_targets(d, int(corpus.numbers[d])) for d in ids[::2]]
    if loss.has_labels:
        assert corpus.numbers is not None
        is_desirable = (corpus.numbers[ids][::2] > 0).astype(np.float64)
    reference = np.zeros_like(targets) if corpus.reference is None else corpus.reference[ids]
    preferences = Preferences(
        loss,
        loss_arguments(train),
        answer_tokens=torch.from_numpy(answer_tokens),
        reference=torch.from_numpy(reference),
        is_desirable=torch.from_numpy(is_desirable),
        learnt_tokens=float(targets[::2].sum()),
    )
    pairs = [(i, i + 1) for i in range(0, len(ids), 2)]
    return DocumentLoss(
        preferences.loss_of_set,
        [tuple(range(len(ids)))] if loss.has_labels else pairs,
        columns=("answer", WEIGHTS) if loss.learns_prompt else (WEIGHTS,),
        also=("mean_logits",) if loss.needs_reference else (),
        figures=preferences.figures,
        units=preferences.units,
    )


class _Figures(NamedTuple):
    """The losses of n pairs (n,) and other figures by TRL's names; log-probabilities and rewards of their documents
    (2 n,), without gradient.
    """

    losses: Tensor
    others: Mapping[str, Tensor]
    log_probs: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class Preferences:
    """A loss of preferences, its arguments, and what is known of the documents before a step.

    `answer_tokens` (D,) is how many tokens the answer in each document has, `reference` (D,) its log-probability by the
    reference model, 0 without one. `is_desirable` (D / 2,) are labels, 1 or 0; 0 for pairs. `learnt_tokens` counts the
    targets of all chosen documents, by which their cross entropy is divided.
    """

    loss: PreferenceLoss
    arguments: Mapping[str, float]
    answer_tokens: Tensor
    reference: Tensor
    is_desirable: Tensor
    learnt_tokens: float

    def loss_of_set(self, sums: Tensor, documents: tuple[int, ...]) -> Tensor:
        """Return the loss of a pair; with labels the mean over the answers of all documents."""
        return self._compute_figures(sums.reshape(len(documents), -1), [*documents]).losses.mean()

    def figures(self, sums: Floats) -> dict[str, float]:
        """Return the means of figures over all documents, by TRL's names, of sums (D, columns) of their
        log-probabilities.

        With a loss that has a reference, the last column has the sums of mean logits. A side (chosen or rejected)
        without an answer has no figures.
        """
        # Prefixes that documents share are left out.
        table = torch.from_numpy(sums[: len(self.answer_tokens)])
        figures = self._compute_figures(table, [*range(len(table))])
        if self.loss.has_labels:
            chosen = 2 * torch.nonzero(self.is_desirable)[:, 0]
            rejected = 2 * torch.nonzero(self.is_desirable == 0)[:, 0]
        else:
            chosen, rejected = (torch.arange(first, len(table), 2) for first in (0, 1))
        sides = {name: side for name, side in (("chosen", chosen), ("rejected", rejected)) if len(side)}
        values = {f"rewards/{name}": figures.rewards[side] for name, side in sides.items()}
        values |= {f"logps/{name}": figures.log_probs[side] for name, side in sides.items()}
        if not self.loss.has_labels:
            is_right = figures.rewards[chosen] > figures.rewards[rejected]
            values["rewards/accuracies"] = is_right.double()
        means = {name: value.mean().item() for name, value in (values | dict(figures.others)).items()}
        if len(sides) == 2:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        if self.loss.needs_reference:
            for name, side in sides.items():
                means[f"logits/{name}"] = (table[side, -1].sum() / self.answer_tokens[side].sum()).item()
        return means

    def units(self, sums: Floats) -> LossUnits:
        """Return the loss of each answer (with labels) or pair, and of pairs the margin of rewards.

        `sums` (D, columns) are those that `figures` takes.
        """
        table = torch.from_numpy(sums[: len(self.answer_tokens)])
        documents = range(len(table))
        figures = self._compute_figures(table, [*documents])
        losses = tuple(figures.losses.tolist())
        if self.loss.has_labels:
            return LossUnits("answer", tuple((i,) for i in documents[::2]), {"loss": losses})
        margins = tuple((figures.rewards[::2] - figures.rewards[1::2]).tolist())
        return LossUnits(
            "pair", tuple((i, i + 1) for i in documents[::2]), {"loss": losses, "rewards/margins": margins}
        )

    def _compute_figures(self, sums: Tensor, documents: list[int]) -> _Figures:
        """`sums` (2 n, columns) are those of n pairs, or with labels of all documents of a step. Only losses and
        other figures have a gradient by `sums`."""
        tokens = self.answer_tokens[documents]
        log_probs = sums[:, 0]
        if self.loss.per_token:
            log_probs = log_probs / tokens
        ratios = log_probs - self.reference[documents]
        # The mean over all pairs is then the mean over all targets of chosen documents, as TRL has it.
        weight = len(self.answer_tokens) / 2 / self.learnt_tokens
        pairs = AnswerPairs(
            chosen=ratios[::2],
            rejected=ratios[1::2],
            chosen_tokens=tokens[::2],
            rejected_tokens=tokens[1::2],
            cross_entropy=-sums[::2, int(self.loss.learns_prompt)] * weight,
            is_desirable=self.is_desirable[[d // 2 for d in documents[::2]]],
        )
        figures = self.loss.formula(pairs, self.arguments)
        losses = figures.pop("loss")
        return _Figures(losses, figures, log_probs.detach(), self.arguments["beta"] * ratios.detach())

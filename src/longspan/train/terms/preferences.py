"""Losses of preferences as TRL has them (DPO, IPO, APO-zero, SimPO, ORPO, KTO), of documents' sums, with TRL's figures.

Pairs are documents 2 i, the chosen one, and 2 i + 1; for KTO 2 i is an answer, and 2 i + 1 its prompt with the answer
to another, by which the divergence from the reference is estimated: over all documents of a step, or of an evaluation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.config.loss_arguments import loss_arguments
from longspan.config.sections import TrainConfig
from longspan.data.corpus_documents import CorpusDocuments
from longspan.layout import Floats
from longspan.train.rows.read_rows import WEIGHTS
from longspan.train.terms.document_loss import DocumentLoss, LossUnits


def preference_loss(documents: CorpusDocuments, train: TrainConfig) -> DocumentLoss:
    """Return the loss of these documents of a corpus by the keys of [train]; its figures have TRL's names."""
    corpus = documents.corpus
    ids = [*documents.ids]
    targets = (corpus.lengths - 1 if corpus.targets is None else corpus.targets)[ids].astype(np.float64)
    answer_tokens = targets.copy()
    is_desirable = None
    if train.loss == "orpo":  # the targets of a chosen document are its prompt's tokens too
        assert corpus.numbers is not None
        answer_tokens[::2] = [corpus.count_targets(d, int(corpus.numbers[d])) for d in ids[::2]]
    elif train.loss == "kto":
        assert corpus.numbers is not None
        is_desirable = torch.from_numpy(corpus.numbers[ids][::2] > 0)
    reference = np.zeros_like(targets) if corpus.reference is None else corpus.reference[ids]
    preferences = Preferences(
        train.loss,
        loss_arguments(train),
        answer_tokens=torch.from_numpy(answer_tokens),
        reference=torch.from_numpy(reference),
        is_desirable=is_desirable,
        learnt_tokens=float(targets[::2].sum()),
    )
    pairs = [(i, i + 1) for i in range(0, len(ids), 2)]
    return DocumentLoss(
        preferences.loss_of_set,
        [tuple(range(len(ids)))] if train.loss == "kto" else pairs,
        columns=("answer", WEIGHTS) if train.loss == "orpo" else (WEIGHTS,),
        also=("mean_logits",) if train.needs_reference else (),
        figures=preferences.figures,
        units=preferences.units,
    )


class _Pairs(NamedTuple):
    """What n pairs give: losses (n,), log-probabilities and rewards of their answers (2 n,), and other figures (n,).

    For SimPO and ORPO the log-probability of an answer is the mean over its tokens, otherwise the sum.
    """

    losses: Tensor
    log_probs: Tensor
    rewards: Tensor
    others: Mapping[str, Tensor]


@dataclass(frozen=True)
class Preferences:
    """A loss of preferences, its arguments, and what is known of the documents before a step.

    `answer_tokens` (D,) is how many tokens the answer in each document has, `reference` (D,) its log-probability by the
    reference model. `is_desirable` (D / 2,) are the labels of KTO's answers, None for other losses. `learnt_tokens`
    counts the targets of all chosen documents, by which SimPO and ORPO divide their cross entropy.
    """

    name: str
    arguments: Mapping[str, float]
    answer_tokens: Tensor
    reference: Tensor
    is_desirable: Tensor | None
    learnt_tokens: float

    def loss_of_set(self, sums: Tensor, documents: tuple[int, ...]) -> Tensor:
        """Return the loss of a pair; for KTO the mean over the answers of all documents."""
        if self.name == "kto":
            return self._kto_figures(sums)[0].mean()
        return self._pair_figures(sums.reshape(2, -1), [*documents]).losses.sum()

    def figures(self, sums: Floats) -> dict[str, float]:
        """Return the means of figures over all documents, by TRL's names, of sums (D, columns) of their
        log-probabilities.

        With a loss that has a reference, the second column has the sums of mean logits. A side (chosen or rejected)
        without an answer has no figures.
        """
        table = torch.from_numpy(sums[: len(self.answer_tokens)])  # without prefixes that documents share
        # `chosen` and `rejected` index rewards and log_probs: those of KTO's answers, or those of pairs' documents.
        if self.name == "kto":
            assert self.is_desirable is not None
            _, rewards, kl = self._kto_figures(table[:, 0])
            log_probs = table[::2, 0]
            others = {"kl": kl}
            chosen = torch.nonzero(self.is_desirable)[:, 0]
            rejected = torch.nonzero(~self.is_desirable)[:, 0]
            documents_of_side = {"chosen": 2 * chosen, "rejected": 2 * rejected}
        else:
            _, log_probs, rewards, others = self._pair_figures(table, [*range(len(table))])
            chosen, rejected = (torch.arange(first, len(table), 2) for first in (0, 1))
            documents_of_side = {"chosen": chosen, "rejected": rejected}
            is_right = rewards[chosen] > rewards[rejected]
            others = {"rewards/accuracies": is_right.double(), **others}
        sides = {name: side for name, side in (("chosen", chosen), ("rejected", rejected)) if len(side)}
        values = {f"rewards/{name}": rewards[side] for name, side in sides.items()}
        values |= {f"logps/{name}": log_probs[side] for name, side in sides.items()}
        means = {name: value.mean().item() for name, value in (values | dict(others)).items()}
        if len(sides) == 2:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        if self.name not in ("simpo", "orpo"):
            for name in sides:
                documents = documents_of_side[name]
                tokens = self.answer_tokens[documents].sum()
                means[f"logits/{name}"] = (table[documents, 1].sum() / tokens).item()
        return means

    def units(self, sums: Floats) -> LossUnits:
        """Return the loss of each answer (kto) or pair, and of pairs the margin of rewards; sums as of `figures`."""
        table = torch.from_numpy(sums[: len(self.answer_tokens)])
        documents = range(len(table))
        if self.name == "kto":
            losses = self._kto_figures(table[:, 0])[0]
            return LossUnits("answer", tuple((i,) for i in documents[::2]), {"loss": tuple(losses.tolist())})
        pairs = self._pair_figures(table, [*documents])
        margins = pairs.rewards[::2] - pairs.rewards[1::2]
        figures = {"loss": tuple(pairs.losses.tolist()), "rewards/margins": tuple(margins.tolist())}
        return LossUnits("pair", tuple((i, i + 1) for i in documents[::2]), figures)

    def _kto_figures(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses (n,) of KTO's answers, their rewards (n,) and the divergence, by sums (2 n,) of the
        documents.
        """
        assert self.is_desirable is not None
        ratios = sums - self.reference
        beta = self.arguments["beta"]
        kl = ratios[1::2].detach().mean().clamp(min=0)
        desirable = self.is_desirable.double()
        weights = self.arguments["desirable_weight"] * desirable
        weights = weights + self.arguments["undesirable_weight"] * (1 - desirable)
        losses = weights * (1 - torch.sigmoid(beta * (2 * desirable - 1) * (ratios[::2] - kl)))
        return losses, beta * ratios[::2].detach(), kl

    def _pair_figures(self, sums: Tensor, documents: list[int]) -> _Pairs:
        """Return what n pairs give, by the sums (2 n, columns) of their documents, whose numbers are in `documents`.

        Rewards and log-probabilities have no gradient; losses have one by `sums`.
        """
        answer_tokens = self.answer_tokens[documents]
        beta = self.arguments["beta"]
        log_probs = sums[:, 0]
        if self.name in ("simpo", "orpo"):  # losses of the mean over an answer's tokens
            log_probs = log_probs / answer_tokens
        ratios = log_probs - self.reference[documents]
        chosen, rejected = ratios[::2], ratios[1::2]
        others = dict[str, Tensor]()
        smoothing = self.arguments.get("label_smoothing", 0.0)
        if self.name == "ipo":
            means = ratios / answer_tokens
            losses = (means[::2] - means[1::2] - 1 / (2 * beta)) ** 2
        elif self.name == "apo_zero":
            losses = 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        elif self.name == "simpo":
            margins = beta * (chosen - rejected) - self.arguments["simpo_gamma"]
            losses = -F.logsigmoid(margins) * (1 - smoothing) - F.logsigmoid(-margins) * smoothing
            if alpha := self.arguments["cpo_alpha"]:
                others["nll_loss"] = self._chosen_cross_entropy(sums[::2, 0])
                losses = losses + alpha * others["nll_loss"]
        elif self.name == "orpo":
            odds = chosen - rejected - _log_of_complement(chosen) + _log_of_complement(rejected)
            others["nll_loss"] = self._chosen_cross_entropy(sums[::2, 1])
            losses = others["nll_loss"] - beta * F.logsigmoid(odds)
            others |= {"log_odds_ratio": F.logsigmoid(odds), "log_odds_chosen": odds}
        else:  # with smoothing TRL's "robust"
            margins = beta * (chosen - rejected)
            losses = -(1 - smoothing) * F.logsigmoid(margins) + smoothing * F.logsigmoid(-margins)
            losses = losses / (1 - 2 * smoothing)
        return _Pairs(losses, log_probs.detach(), beta * ratios.detach(), others)

    def _chosen_cross_entropy(self, sums: Tensor) -> Tensor:
        """Return the cross entropy (n,) of n chosen documents, by the sums (n,) of their log-probabilities.

        Each is divided by the mean number of targets of all chosen documents: the mean over all pairs is then the mean
        over all their targets, as TRL has it.
        """
        return -sums * (len(self.answer_tokens) / 2 / self.learnt_tokens)


def _log_of_complement(log_probs: Tensor) -> Tensor:
    """Return log(1 − p) of log p, for p near 0 and near 1."""
    return torch.where(log_probs > -math.log(2), (-log_probs.expm1()).log(), (-log_probs.exp()).log1p())

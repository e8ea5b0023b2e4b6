"""Losses of scores, and scores themselves: what a model with a head of scores makes of a plan's documents.

Losses are those of transformers' heads: means over all that count, not multiplied by steps of accumulation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.comm import World
from longspan.data.scored_document import LABEL
from longspan.errors import LossError, plural
from longspan.layout import Floats
from longspan.model.kinds import score_columns
from longspan.model.layers import architecture_name
from longspan.plan import Plan
from longspan.train.passes import Passes, read_step_batches, run_passes
from longspan.train.rows.read_rows import WEIGHTS
from longspan.train.step_inputs import check_step_arguments
from longspan.train.terms.collected_log_probs import CollectedLogProbs
from longspan.train.terms.document_loss import DocumentLoss, LossUnits
from longspan.train.terms.loss_tokens import LossFunction, LossTokens

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
_PROBLEMS: tuple[ProblemType, ...] = ("regression", "single_label_classification", "multi_label_classification")


def score_loss(problem: ProblemType | None = None) -> LossFunction:
    """Return the loss of scores by labels, as transformers' classifiers have it, for `loss=` of `run_step`.

    >>> run_step(model, plan, [ScoredDocument(ids, label=2)], world, optimizer, loss=score_loss())

    A row has one score or L, and one label, `at["label"]`, or L, `at["label_0"]` and so on. Its loss is the squared
    error (the mean over L), the cross entropy of one of L classes, or the binary cross entropy of L classes (their
    mean), times its weight in `at["weights"]`. A `problem` None is chosen by the rows: regression for one score,
    single-label classification for one label, multi-label classification for L labels. A step without `loss=` takes
    this loss, by the configuration's `problem_type`. Raises LossError for another `problem`, and the loss raises it for
    labels that do not fit.
    """
    if problem not in (None, *_PROBLEMS):
        raise LossError(f"the problem of a loss of scores is {problem!r}; use {', '.join(_PROBLEMS)}, or None")

    def losses(scores: Tensor, at: LossTokens) -> Tensor:
        """Return the weighted losses (t,) of scores (t,) or (t, L), by `problem` or the one that the labels suggest."""
        count = 1 if scores.ndim == 1 else scores.shape[1]
        has_one_label = LABEL in at.values or count == 1
        chosen = problem or default_problem_type(count, 1 if has_one_label else count)
        names = [LABEL] if has_one_label else [f"{LABEL}_{i}" for i in range(count)]
        labels = torch.stack([at[name] for name in names], -1)
        table = scores.reshape(len(at), count)
        if chosen == "single_label_classification":
            classes = labels[:, 0].long()
            outside = (classes != labels[:, 0]) | (classes < 0) | (classes >= count)
            if labels.shape[1] > 1 or bool(outside.any()):
                raise LossError(
                    f"a row has the label {labels.flatten().tolist()[:4]} among {count} classes; give one integer "
                    f"from 0 to {count - 1}, or leave the row out (−100 of labels)"
                )
            return F.cross_entropy(table, classes, reduction="none") * at[WEIGHTS]
        refuse_other_labels(chosen, count, labels.shape[1])
        if chosen == "regression":
            return (table - labels).square().mean(-1) * at[WEIGHTS]
        return F.binary_cross_entropy_with_logits(table, labels, reduction="none").mean(-1) * at[WEIGHTS]

    return losses


def refuse_other_labels(problem: str | None, scores: int, labels: int) -> None:
    """Raise LossError for a number of labels of a row that a `problem_type` (None: any) does not take."""
    labels_of_problem = 1 if problem == "single_label_classification" else scores
    if problem is not None and labels != labels_of_problem:
        raise LossError(
            f"problem_type {problem!r} takes {plural(labels_of_problem, 'label')} of a row, and rows have {labels} "
            f"for {plural(scores, 'score')}; set problem_type of the model's configuration (config.json) to "
            f"{default_problem_type(scores, labels)!r}, or give each row {labels_of_problem}"
        )


def default_problem_type(scores: int, labels: int) -> ProblemType:
    """Return the `problem_type` that transformers' classifiers take for so many scores and labels of a row."""
    if scores == 1:
        return "regression"
    return "single_label_classification" if labels == 1 else "multi_label_classification"


def configured_loss(model: nn.Module) -> LossFunction:
    """Return the loss that a prepared model's class has for its labels, by the configuration's `problem_type`."""
    kind: Any = getattr(model, "architecture", type(model))
    if kind.__name__.endswith("ForTokenClassification") and score_columns(model) > 1:
        return score_loss("single_label_classification")  # whatever `problem_type` says
    return score_loss(getattr(model.config, "problem_type", None))  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


def reward_loss(
    pairs: Sequence[tuple[int, int]],
    *,
    margins: Sequence[float] | None = None,
    center_rewards_coefficient: float | None = None,
) -> DocumentLoss:
    """Return the loss of pairs (chosen, rejected) of documents, numbered as in the plan, for `loss=` of `run_step`.

    >>> run_step(model, plan, documents, world, optimizer, loss=reward_loss([(0, 1), (2, 3)]))

    −log σ(chosen − rejected − margin) + coefficient · (chosen + rejected)², the mean over pairs, as TRL's RewardTrainer
    has it: one score (L = 1) of each document. Raises LossError for another number of margins than of pairs.
    """
    if margins is not None and (len(margins) != len(pairs) or not all(map(math.isfinite, margins))):
        raise LossError(f"{plural(len(pairs), 'pair')} have {len(margins)} margins; give a finite number for each")
    sets = tuple(map(tuple, pairs))
    by_pair = dict(zip(sets, margins or [0.0] * len(sets), strict=True))

    def loss_of_pair(scores: Tensor, documents: tuple[int, ...]) -> Tensor:
        """Return the loss of one pair, of the scores (2,) of its chosen and its rejected document."""
        if scores.shape != (2,):
            raise LossError(f"a pair has scores of shape {tuple(scores.shape)}; use a head of one score, and pairs")
        loss = -F.logsigmoid(scores[0] - scores[1] - by_pair[documents])
        return loss + (center_rewards_coefficient or 0.0) * scores.sum().square()

    def units(scores: Floats) -> LossUnits:
        """Return the loss of each pair, by the scores (D,) of documents."""
        losses = tuple(float(loss_of_pair(torch.from_numpy(scores[list(pair)]), pair)) for pair in sets)
        return LossUnits("pair", sets, {"loss": losses})

    return DocumentLoss(loss_of_pair, pairs, units=units)


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Scores of documents of these lengths, the same on every rank; `values` (rows of all documents, L) end to end.

    `sums` (D, L) are those of each document times the weights of its rows, as a DocumentLoss gets them. Where documents
    share prefixes, `bases` (D,) are the rows before each document's own: none of these counts.
    """

    lengths: tuple[int, ...]
    values: Floats
    sums: Floats
    bases: tuple[int, ...] = ()

    def of(self, document: int) -> Floats:
        """Return the scores of a document's rows (length, L), those of its shared prefix among them; 0 at rows that do
        not count.
        """
        start = sum(self.lengths[:document])
        own_values = self.values[start : start + self.lengths[document]]
        if not self.bases:
            return own_values
        return np.concatenate([np.zeros((self.bases[document], self.values.shape[1])), own_values])


def token_scores(
    model: nn.Module, plan: Plan, documents: Any, world: World, loss_chunk_rows: int = 0
) -> TokenScores:
    """Compute the scores of all rows of a plan's documents that count, on every rank; no gradient.

    >>> values = token_scores(model, plan, [ScoredDocument(ids, rows="all")], world).of(0)      # (length, L)
    >>> rewards = token_scores(model, plan, [ScoredDocument(ids, pad=pad) for ids in answers], world).sums[:, 0]

    By default one row of a ScoredDocument counts, whose scores `sums` then has.

    The model runs in evaluation mode, under any plan of these documents; all ranks call it together, and it refuses
    what `run_step` refuses.
    """
    inputs = check_step_arguments(model, plan, documents, world, backward=False)
    if not (columns := score_columns(inputs.language_model)):
        raise LossError(
            f"{architecture_name(inputs.language_model)} predicts tokens and has no scores; use token_log_probs, or "
            "prepare a model with a head of scores"
        )
    batches = read_step_batches(inputs, ())
    collected = CollectedLogProbs(plan.lengths, loss_chunk_rows, scores=columns)
    run_passes(Passes.with_terms(inputs, (), collected), batches)
    values, sums = collected.gather_tables(world)
    return TokenScores(plan.lengths, values.T, sums.T, plan.bases)

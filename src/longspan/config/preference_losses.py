"""The losses of preferences that `train.loss` names, a row each, as TRL has them. Torch is imported where one computes.

What is logged of them, and of which documents they are, is in `train/terms/preferences.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# What rows become: pairs, pairs whose chosen document is learnt whole, or answers with labels; "" without preferences.
RowForm = Literal["", "pairs", "orpo", "kto"]


class AnswerPairs(NamedTuple):
    """What a formula gets of n pairs, each value (n,) in float64.

    `chosen` and `rejected` are log-probabilities of answers, sums or means over their tokens, minus the sums of the
    reference; with labels those of answers, and of prompts with the answers to others. `cross_entropy` is that of what
    is learnt of a chosen document, and its mean over pairs the mean over all targets of chosen documents.
    `is_desirable` is 1 or 0 by the labels, 0 without them.
    """

    chosen: "Tensor"
    rejected: "Tensor"
    chosen_tokens: "Tensor"
    rejected_tokens: "Tensor"
    cross_entropy: "Tensor"
    is_desirable: "Tensor"


# "loss" (n,) comes first; other figures, (n,) or scalars, are logged by their names, which are TRL's.
Formula = Callable[[AnswerPairs, Mapping[str, float]], dict[str, "Tensor"]]


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of preferences: its formula, its arguments by TRL's names with their defaults, and what it is of.

    One argument is `beta`, by which rewards are multiplied. `needs_reference`: log-probabilities are compared with
    those of a reference model. `per_token`: they are means over an answer's tokens. `learns_prompt`: targets of a
    chosen document are its prompt's tokens too. `has_labels`: rows are answers with labels, and the loss is of
    all documents of a step together.
    """

    formula: Formula
    arguments: Mapping[str, float]
    needs_reference: bool = True
    per_token: bool = False
    learns_prompt: bool = False
    has_labels: bool = False

    @property
    def row_form(self) -> RowForm:
        """What rows become for this loss."""
        if self.has_labels:
            return "kto"
        return "orpo" if self.learns_prompt else "pairs"


def _dpo(pairs: AnswerPairs, arguments: Mapping[str, float]) -> dict[str, "Tensor"]:
    # With smoothing it is TRL's "robust".
    smoothing = arguments["label_smoothing"]
    margins = arguments["beta"] * (pairs.chosen - pairs.rejected)
    losses = -(1 - smoothing) * _log_sigmoid(margins) + smoothing * _log_sigmoid(-margins)
    return {"loss": losses / (1 - 2 * smoothing)}


def _ipo(pairs: AnswerPairs, arguments: Mapping[str, float]) -> dict[str, "Tensor"]:
    margins = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return {"loss": (margins - 1 / (2 * arguments["beta"])) ** 2}


def _apo_zero(pairs: AnswerPairs, arguments: Mapping[str, float]) -> dict[str, "Tensor"]:
    beta = arguments["beta"]
    return {"loss": 1 - (beta * pairs.chosen).sigmoid() + (beta * pairs.rejected).sigmoid()}


def _cpo(pairs: AnswerPairs, arguments: Mapping[str, float]) -> dict[str, "Tensor"]:
    # With a target of margins and means over tokens it is SimPO.
    smoothing = arguments["label_smoothing"]
    margins = arguments["beta"] * (pairs.chosen - pairs.rejected) - arguments.get("simpo_gamma", 0.0)
    losses = -_log_sigmoid(margins) * (1 - smoothing) - _log_sigmoid(-margins) * smoothing
    if alpha := arguments["cpo_alpha"]:
        return {"loss": losses + alpha * pairs.cross_entropy, "nll_loss": pairs.cross_entropy}
    return {"loss": losses}


def _orpo(pairs: AnswerPairs, arguments: Mapping[str, float]) -> dict[str, "Tensor"]:
    odds = pairs.chosen - pairs.rejected - _log_of_complement(pairs.chosen) + _log_of_complement(pairs.rejected)
    return {
        "loss": pairs.cross_entropy - arguments["beta"] * _log_sigmoid(odds),
        "nll_loss": pairs.cross_entropy,
        "log_odds_ratio": _log_sigmoid(odds),
        "log_odds_chosen": odds,
    }


def _kto(pairs: AnswerPairs, arguments: Mapping[str, float]) -> dict[str, "Tensor"]:
    # The divergence from the reference is estimated by the mismatched documents, and has no gradient.
    kl = pairs.rejected.detach().mean().clamp(min=0)
    desirable = pairs.is_desirable
    weights = arguments["desirable_weight"] * desirable
    weights = weights + arguments["undesirable_weight"] * (1 - desirable)
    losses = weights * (1 - (arguments["beta"] * (2 * desirable - 1) * (pairs.chosen - kl)).sigmoid())
    return {"loss": losses, "kl": kl}


def _log_sigmoid(values: "Tensor") -> "Tensor":
    from torch.nn import functional

    return functional.logsigmoid(values)


def _log_of_complement(log_probs: "Tensor") -> "Tensor":
    """Return log(1 − p) of log p, for p near 0 and near 1."""
    return (-log_probs.expm1()).log().where(log_probs > -math.log(2), (-log_probs.exp()).log1p())


_DPO = PreferenceLoss(_dpo, {"beta": 0.1, "label_smoothing": 0.0})
LOSSES: Mapping[str, PreferenceLoss] = {
    "dpo": _DPO,
    "sigmoid": _DPO,
    "ipo": PreferenceLoss(_ipo, {"beta": 0.1}),
    "apo_zero": PreferenceLoss(_apo_zero, {"beta": 0.1}),
    "cpo": PreferenceLoss(_cpo, {"beta": 0.1, "cpo_alpha": 1.0, "label_smoothing": 0.0}, needs_reference=False),
    # TRL's default of cpo_alpha is 1.0; 0 is SimPO itself.
    "simpo": PreferenceLoss(
        _cpo,
        {"beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 0.0, "label_smoothing": 0.0},
        needs_reference=False,
        per_token=True,
    ),
    "orpo": PreferenceLoss(_orpo, {"beta": 0.1}, needs_reference=False, per_token=True, learns_prompt=True),
    "kto": PreferenceLoss(_kto, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}, has_labels=True),
}
if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal["", *LOSSES]

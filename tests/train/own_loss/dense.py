"""Losses of one's own in one process: documents one by one through a stock model, one autograd graph for all.

It runs where the model's weights are: a GPU's float32, as in rotary tables, is not the host's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan import Plan, World, run_step
from longspan.train import Document, LossTokens, MicroBatchTokens, TokenLogProbs
from tests.model.stock import error, gradients_of, texts

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
MASKED, WHOLE = 6, 2  # every token of the one is masked, none of the other


def documents_of(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Document]:
    random, documents = np.random.default_rng(seed), list[Document]()
    for number, ids in enumerate(texts(lengths, seed)):
        share = {MASKED: 0.0, WHOLE: 1.0}.get(number, 0.6)
        documents.append(
            Document(
                ids,
                loss_mask=random.random(len(ids)) < share,
                weights=random.random(len(ids)),
                advantage=random.normal(),
                old=-random.random(len(ids)) - 3.0,
            )
        )
    return documents


def targets_of(documents: Sequence[Document]) -> int:
    return sum(document.targets for document in documents)


def policy_loss(log_probs: Tensor, at: LossTokens) -> Tensor:
    """A clipped ratio that depends on everything that a loss is told, unlike in every place."""
    ratio = (log_probs - at["old"]).exp()
    clipped = torch.minimum(ratio * at["advantage"], ratio.clamp(0.8, 1.2) * at["advantage"])
    more = 0.01 * at.position * log_probs + 0.1 * (at.document + 1) * log_probs.sin() + 0.003 * at.target * log_probs
    more = more * (1 + 0.1 * at.entropy - 0.2 * at.top1 + at.mean_logits + 0.03 * at.log_sum_sq_probs)
    return at["weights"] * (more - clipped)


def pair_loss(sums: Tensor, documents: tuple[int, ...]) -> Tensor:
    """Of a set of any size, of which the first document is to win."""
    return -F.logsigmoid(0.1 * (sums[0] - sums[1:].sum() + documents[0])) + 0.01 * (sums**2).sum() / (documents[-1] + 1)


def sequence_loss(log_probs: Tensor, entropies: Tensor, positions: Tensor, document: int) -> Tensor:
    """Of a document's tokens together, at these positions, whichever other documents are with it."""
    ratio = (0.02 * log_probs.sum()).exp() * (document + 1)
    return ratio + 0.01 * (positions * log_probs).square().sum() - 0.05 * (positions * entropies).square().sum()


def micro_batch_loss(tokens: MicroBatchTokens) -> Tensor:
    parts = (tokens.values[name].split(tokens.lengths) for name in ("log_probs", "entropy"))
    by_document = zip(*parts, tokens.documents, strict=True)
    return torch.stack([sequence_loss(x, h, torch.arange(len(x)), d) for x, h, d in by_document]).sum()


class Rows(NamedTuple):
    log_probs: Tensor
    at: LossTokens


def rows_of(model: nn.Module, documents: Sequence[Document], temperature: float = 1.0) -> list[Rows]:
    return [_rows(model, document, number, temperature) for number, document in enumerate(documents)]


def _rows(model: nn.Module, document: Document, number: int, temperature: float) -> Rows:
    positions, device = np.arange(len(document)), next(model.parameters()).device
    ids, labels = (torch.from_numpy(x).to(device) for x in (document[positions], document.labels(positions)))
    logits = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
    out = logits.log_softmax(-1)
    predicting = torch.nonzero(labels[1:] != -100).squeeze(1)
    targets = labels[predicting + 1]
    values = {"weights": np.ones(len(document)), **document.token_values(positions)}
    values = {n: torch.from_numpy(x).to(device)[predicting + 1] for n, x in values.items()}
    of_rows: Any = Statistics(logits[predicting], targets)
    at = LossTokens(torch.full_like(targets, number), predicting, targets, values, of_rows)
    return Rows(out[predicting].gather(1, targets[:, None]).squeeze(1), at)


class Statistics(NamedTuple):
    """What a row's distribution says, by its definition."""

    logits: Tensor
    targets: Tensor

    def value(self, name: str) -> Tensor:
        p = self.logits.detach().softmax(-1)
        return {
            "entropy": -(p * p.log()).sum(-1),
            "top1": (p == p.amax(-1, keepdim=True)).double().gather(1, self.targets[:, None]).squeeze(1),
            "mean_logits": self.logits.detach().sum(-1) / self.logits.shape[-1],
            "log_sum_sq_probs": (p * p).sum(-1).log(),
        }[name]


def weighted(rows: Sequence[Rows]) -> Tensor:
    return -torch.stack([(row.log_probs * row.at["weights"]).sum() for row in rows]).sum()


def own(rows: Sequence[Rows]) -> Tensor:
    return torch.stack([policy_loss(*row).sum() for row in rows]).sum()


def by_document(rows: Sequence[Rows]) -> Tensor:
    distributions: list[Any] = [row.at.distributions for row in rows]
    log_probs = [x.logits.log_softmax(-1) for x in distributions]
    entropies = [-(x * x.exp()).sum(-1) for x in log_probs]
    parts = zip(rows, entropies, strict=True)
    return torch.stack(
        [sequence_loss(row.log_probs, h, row.at.position + 1, d) for d, (row, h) in enumerate(parts)]
    ).sum()


def of_sets(sets: Sequence[Sequence[int]]) -> Callable[[Sequence[Rows]], Tensor]:

    def loss(rows: Sequence[Rows]) -> Tensor:
        sums = torch.stack([(row.log_probs * row.at["weights"]).sum() for row in rows])
        return torch.stack([pair_loss(sums[list(documents)], tuple(documents)) for documents in sets]).sum()

    return loss


class Answer(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]


def answer(model: nn.Module, rows: Sequence[Rows], loss: Callable[[Sequence[Rows]], Tensor], divisor: float) -> Answer:
    model.zero_grad()
    value = loss(rows) / divisor
    value.backward(retain_graph=True)
    return Answer(value.item(), {name: g.clone() for name, g in gradients_of(model).items()})


def values_of_tokens(rows: Sequence[Rows], documents: Sequence[Document], also: Sequence[str]) -> list[np.ndarray]:
    """Of each document's tokens the log-probabilities and what `also` names (1 + k, n); 0 where none is predicted."""
    tokens = [np.zeros((1 + len(also), len(document))) for document in documents]
    for values, row in zip(tokens, rows, strict=True):
        numbers = torch.stack([row.log_probs.detach(), *(getattr(row.at, name) for name in also)])
        values[:, row.at.position.cpu().numpy() + 1] = numbers.cpu().numpy()
    return tokens


def loss_errors(
    model: nn.Module,
    plan: Plan,
    documents: Any,
    world: World,
    answers: Mapping[str, Answer],
    losses: Mapping[str, tuple[Any, ...]],
    **step: Any,
) -> dict[str, float]:
    """Of each loss (…, loss, …, divisor) the largest error of a step's loss and gradients, and of an evaluation's."""
    names, errors = {name for name, p in model.named_parameters() if p.requires_grad}, dict[str, float]()
    for name, wanted in answers.items():
        _, loss, _, divisor = losses[name]
        result = run_step(model, plan, documents, world, loss=loss, divisor=divisor, **step)
        gradients = gradients_of(model)
        worst = [error(gradients[n], wanted.gradients[n]) for n in gradients] if gradients.keys() == names else [np.inf]
        evaluated = run_step(model, plan, documents, world, loss=loss, divisor=divisor, backward=False, **step)
        errors[name] = max(*worst, *(abs(x.loss / wanted.loss - 1) for x in (result, evaluated)))
        model.zero_grad()
    return errors


def token_error(
    found: TokenLogProbs, tokens: Sequence[np.ndarray], documents: Sequence[Document], also: Sequence[str]
) -> float:
    """The largest error of tokens' values, as a share of 4, and of documents' weighted sums, of 50."""
    apart = list[float]()
    for row, value_of in enumerate((found.of, *(partial(found.value, name) for name in also))):
        apart += [np.abs(value_of(d) - values[row]).max() / 4 for d, values in enumerate(tokens)]
    for document, total, values in zip(documents, found.sums, tokens, strict=False):
        weights = document.token_values(np.arange(len(document)))["weights"]
        apart.append(abs(total - (values[0] * weights).sum()) / 50)
    return max(apart)

"""What a loss of one's own could get wrong without an error, put into the code on purpose: the tests would show it."""

import pytest
import torch

from longspan import DocumentLoss, Group, Layout, MicroBatch, Plan, World, run_step
from longspan.errors import LongspanError
from longspan.testing import backend, run_ranks
from tests.model.deep import deep
from tests.model.stock import error, gradients_of, prepare_untried
from tests.mutation import mutated
from tests.train.own_loss.dense import (
    LENGTHS,
    Answer,
    answer,
    documents_of,
    of_sets,
    own,
    pair_loss,
    policy_loss,
    rows_of,
    targets_of,
    weighted,
)

LOSS, OWN, ALL = "train.loss", "train.terms.", "weights tokens sets all"
DOCUMENTS, LOG_PROBS = OWN + "document_loss", OWN + "collected_log_probs"
SUM = 'self._world.control.sum_over_slots(local[ids].ravel().tolist(), "numbers of documents")'
MUTATIONS = {  # what is wrong -> the module, what stands there, and in its place; and the losses that show it
    "nothing": (None, ""),
    "a rank's sum dropped inside a micro-batch": ((DOCUMENTS, SUM, "local[ids].ravel()"), "sets"),
    "a rank's sum dropped in the pass ahead": (
        (LOG_PROBS, 'world.control.sum_array_over_ranks(flat, "log-probabilities of tokens")', "flat"), "all"),
    "a loss counted by every slot": ((OWN + "micro_batch_loss", "loss if world.slot == 0 else 0.0", "loss"), "sets"),
    "a loss counted by every rank": ((DOCUMENTS, "if not is_first_rank(self._world):", "if False:"), "all"),
    "divided by ranks": (("train.passes", "loss_sum / self.divisor", "loss_sum / self.divisor / self.world.home.slots"),
                         ALL),
    "divided by micro-batches": (
        ("train.passes", "loss_sum / self.divisor", "loss_sum / self.divisor / len(self.plan.micro_batches)"),
        ALL),
    "mask forgotten in the divisor": (
        ("train.step", "max(plan.targets, 1)", "max(plan.tokens - len(plan.lengths), 1)"), "weights"),
    "mask forgotten in the divisor of a loss of one's own": (
        (OWN + "loss_term", "max(plan.targets, 1)", "max(plan.tokens - len(plan.lengths), 1)"), "tokens"),
    "weights forgotten in the gradient": (
        (LOSS, "sum(dtype=torch.float64), slopes", "sum(dtype=torch.float64), -torch.ones_like(slopes)"),
        "weights"),
    "weights forgotten in the gradient of sets": (
        (DOCUMENTS, "targets.weighted_rows(coefficients[targets.documents].T, self.loss.columns, self._width).T",
         "coefficients[targets.documents]"),
        "sets all"),
    "weights forgotten in the pass ahead": (
        (LOG_PROBS, "targets.weighted_rows(numbers, self._columns, self._scores)", "numbers"), "all"),
    "weights multiplied beside a loss of one's own": (
        (OWN + "loss_tokens", "total = losses.sum(",
         'total = (losses * targets.loss_tokens(part, leaf.dtype)["weights"]).sum('),
        "tokens"),
    "the loss called on padding": (
        (LOSS, "        losses = _no_loss\n", ""),
        "tokens"),
    "the loss called on rows without a label": (
        ("train.rows.read_rows", "flatnonzero(batch.labels != NO_TARGET)", "flatnonzero(batch.ids != NO_TARGET)"),
        ALL),
    "positions of the token that is predicted": (
        (OWN + "loss_tokens", "to_device(self.path_positions[part]", "to_device(self.path_positions[part] + 1"),
        "tokens"),
    "a gradient of the softmax alone": (
        ("train.log_probs", ".scatter_add_(1, columns, slopes.unsqueeze(1))", ""), ALL),
    "a head's gradient of one chunk": ((LOSS, "        total += gradient", "        pass"), ALL),
}  # fmt: skip
BATCHES = (
    MicroBatch((Group((0, 1), (0, 1, 2), (13, 1, 30)),)),
    MicroBatch((Group((1,), (3, 4), (7, 2)),)),  # slot 0 has padding alone
    MicroBatch((Group((1, 0), (5, 6), (18, 5)), Group((0,), (7,), (9,)))),
)
SETS = ((0, 1, 2), (3, 4), (5, 6, 7))


def wanted(device: torch.device) -> dict[str, Answer]:
    model, documents = deep("qwen3", torch.float64, 1).to(device), documents_of()
    rows, targets = rows_of(model, documents), targets_of(documents)
    return {
        "weights": answer(model, rows, weighted, targets),
        "tokens": answer(model, rows, own, targets),
        "sets": answer(model, rows, of_sets(SETS), len(SETS)),
        "all": answer(model, rows, of_sets([range(len(LENGTHS))]), 1),
    }


def notice(rank: int) -> dict[str, set[str]]:
    """By what is wrong, the losses that show it: by another value, another gradient or an error."""
    noticed, documents = dict[str, set[str]](), documents_of()
    losses = {"weights": None, "tokens": policy_loss}
    losses |= {"sets": DocumentLoss(pair_loss, SETS), "all": DocumentLoss(pair_loss)}
    with World(Layout(2), backend=backend(), timeout=60) as world:
        model, exact = prepare_untried(deep("qwen3", torch.float64, 1), world), wanted(world.device)
        plan = Plan(2, LENGTHS, BATCHES, targets=targets_of(documents)).check()
        for name, (change, how) in MUTATIONS.items():
            noticed[name] = set()
            with mutated(change):
                for of in how.split() or losses:
                    model.zero_grad()
                    try:
                        value = run_step(model, plan, documents, world, loss=losses[of], loss_chunk_rows=4).loss
                        gradients = gradients_of(model)
                        worst = max(error(gradients[n], g) for n, g in exact[of].gradients.items())
                        if max(worst, abs(value / exact[of].loss - 1)) > 1e-9:
                            noticed[name].add(of)
                    except (LongspanError, RuntimeError, IndexError):
                        noticed[name].add(of)
    return noticed


@pytest.mark.whole
def test_every_mutation_is_noticed() -> None:
    for noticed in run_ranks(notice, 2):
        assert noticed["nothing"] == set()
        missed = {name: noticed[name] for name, (_, how) in MUTATIONS.items() if set(how.split()) != noticed[name]}
        assert not missed

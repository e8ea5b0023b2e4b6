"""What a loss of one's own may get wrong: one clear error on every rank, weights as before, and nothing hangs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from longspan import Document, DocumentLoss, Layout, LongspanError, World, plan_fixed, prepare, run_step
from longspan.errors import CommError, DataError, LossError, ModelError
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer
from tests.model.deep import deep
from tests.model.lora.adapted import adapted
from tests.model.stock import VOCABULARY, tiny, weights_of
from tests.train.own_loss.dense import LENGTHS, documents_of, pair_loss, policy_loss, targets_of

Makes = Callable[[int], dict[str, Any]]


def _raises_on(rank: int) -> Callable[..., Any]:
    def loss(log_probs: torch.Tensor, at: Any) -> torch.Tensor:
        if rank == 1:
            raise ZeroDivisionError("no advantage")
        return -log_probs

    return loss


def _sets_that_raise(rank: int) -> Callable[..., Any]:
    def loss(sums: torch.Tensor, documents: tuple[int, ...]) -> torch.Tensor:
        if rank == 1:
            raise KeyError("reference")
        return sums.sum()

    return loss


def _unlike(rank: int) -> Callable[..., Any]:
    """A function of documents that is another one on rank 1."""
    return lambda sums, documents: (1 + 0.01 * rank) * sums.sum()


REFUSED: dict[str, tuple[Makes, type[LongspanError], str]] = {  # what is passed on a rank, and what all of them say
    "no function": (lambda rank: {"loss": 3}, LossError, r"loss is 3; give a function of \(log_probs, at\)"),
    "no function of sets": (lambda rank: {"loss": DocumentLoss(3)}, LossError, "the function of a DocumentLoss is 3"),  # type: ignore[arg-type]
    "no divisor": (lambda rank: {"divisor": 0}, LossError, "divisor is 0; give a positive number"),
    "infinite divisor": (lambda rank: {"divisor": float("inf")}, LossError, "divisor is inf; give a positive number"),
    "true divisor": (lambda rank: {"divisor": True}, LossError, "divisor is True"),
    "divisors of ranks": (lambda rank: {"divisor": 1 + rank}, CommError, "2 different losses, sets or divisors"),
    "temperatures of ranks": (
        lambda rank: {"temperature": 0.7 if rank else 1.0}, CommError, "hold 2 different plans .* temperature= be the"
    ),
    "a loss on one rank": (lambda rank: {"loss": policy_loss} if rank else {}, CommError, "the ranks hold 2 different"),
    "sets of ranks": (
        lambda rank: {"loss": DocumentLoss(pair_loss, [(0, 1 + rank)])}, CommError, "2 different losses, sets or"
    ),
    "a divisor of one rank that is none": (
        lambda rank: {"divisor": -1 if rank else 3}, LossError, r"divisor is -1; give a positive number.*rank 1"
    ),
    "no loss on one rank": (lambda rank: {"loss": 3 if rank else policy_loss}, LossError, "loss is 3; give a function"),
    "a divisor on one rank": (
        lambda rank: {"divisor": 3} if rank else {}, CommError, "same sets and divisor=|be given on all ranks"
    ),
    "sets of one rank that are none": (
        lambda rank: {"loss": DocumentLoss(pair_loss, [(0, 8 if rank else 1)])}, LossError, r"\(0, 8\), the plan has"
    ),
    "documents in place of sets": (
        lambda rank: {"loss": DocumentLoss(pair_loss, [0, 1])}, LossError, "set 0 of a DocumentLoss is 0; give"  # type: ignore[list-item]
    ),
    "no sets": (lambda rank: {"loss": DocumentLoss(pair_loss, 4)}, LossError, "the sets of a DocumentLoss are 4; give"),  # type: ignore[arg-type]
    "words in a set": (
        lambda rank: {"loss": DocumentLoss(pair_loss, [("a", 1)])}, LossError, r"set 0 of .* is \('a', 1\); give"  # type: ignore[list-item]
    ),
    "truths in a set": (
        lambda rank: {"loss": DocumentLoss(pair_loss, [(True, 2)])}, LossError, r"set 0 of .* is \(True, 2\); give"
    ),
    "parts of numbers": (
        lambda rank: {"loss": DocumentLoss(pair_loss, [(0.9, 1)])}, LossError, r"set 0 of .* is \(0.9, 1\); give"  # type: ignore[list-item]
    ),
    "another function of sets on one rank, inside a micro-batch": (
        lambda rank: {"loss": DocumentLoss(_unlike(rank), [(0,)])}, LossError, "gave other losses or derivatives"
    ),
    "another function of sets on one rank": (
        lambda rank: {"loss": DocumentLoss(_unlike(rank))}, LossError, "gave other losses or derivatives on some ranks"
    ),
    "no such document": (
        lambda rank: {"loss": DocumentLoss(pair_loss, [(0, 8)])}, LossError, r"\(0, 8\), the plan has documents 0 to 7"
    ),
    "an empty set": (lambda rank: {"loss": DocumentLoss(pair_loss, [()])}, LossError, r"set 0 of .* is \(\)"),
    "a document twice": (lambda rank: {"loss": DocumentLoss(pair_loss, [(1, 1)])}, LossError, "document of a set once"),
    "a scalar": (
        lambda rank: {"loss": lambda x, at: x.sum()}, LossError, r"float64 of shape \(\) for \d+ log-probabilities"
    ),
    "no tensor": (lambda rank: {"loss": lambda x, at: 0.5}, LossError, r"the loss gave float for \d+ log-"),
    "integers": (lambda rank: {"loss": lambda x, at: at.target}, LossError, "the loss gave torch.int64 of shape"),
    "no such name": (
        lambda rank: {"loss": lambda x, at: x * at["reward"]},
        DataError,
        "the loss asks for 'reward', the documents of this step have advantage, old, weights; give it with each",
    ),
    "an exception": (
        lambda rank: {"loss": _raises_on(rank)}, LossError, "^the loss failed on rank 1: ZeroDivisionError: no adv"
    ),
    "an exception of sets": (
        lambda rank: {"loss": DocumentLoss(_sets_that_raise(rank), [(0, 2)])}, LossError, "failed on rank 1: KeyError"
    ),
    "an exception of sets in several micro-batches": (
        lambda rank: {"loss": DocumentLoss(_sets_that_raise(rank))}, LossError, "rank 1: KeyError: 'reference'"
    ),
    "a loss for each document": (
        lambda rank: {"loss": DocumentLoss(lambda sums, _: sums)}, LossError, r"float64 of shape \(8,\) for documents"
    ),
}  # fmt: skip


def _refusals(rank: int, home: Layout) -> dict[str, tuple[str, str]]:
    """What this rank is told, by case; afterwards a step must go on from the weights that were there."""
    documents, told = documents_of(), dict[str, tuple[str, str]]()
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare(deep("qwen3", torch.float64, 2), world, probe=False)
        optimizer, before = build_optimizer(model, "sgd", lr=0.1), weights_of(model)
        degree = min(2, home.slots)
        plan = plan_fixed(LENGTHS, home, cp=degree, max_tokens_per_slot=48 // degree, targets=targets_of(documents))
        assert run_step(model, plan, documents, world, divisor=[3, 3.0][rank]).divisor == 3
        run_step(model, plan, documents, world, temperature=[2, 2.0][rank])  # equal numbers are one temperature
        assert run_step(model, plan, documents, world, divisor=torch.tensor([3.0])).divisor == 3  # type: ignore[arg-type]
        for name, (make, _, _) in REFUSED.items():
            if name.endswith("inside a micro-batch") and home.pp > 1:
                make = REFUSED["another function of sets on one rank"][0]  # the last stage is one rank
            with pytest.raises(LongspanError) as error:
                run_step(model, plan, documents, world, optimizer, **make(rank))
            told[name] = type(error.value).__name__, str(error.value)
        after = weights_of(model)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        wanted = run_step(prepare(deep("qwen3", torch.float64, 2), world, probe=False), plan, documents, world)
        assert run_step(model, plan, documents, world, optimizer).grad_norm == pytest.approx(
            wanted.grad_norm, rel=1e-12
        )
    return told


@pytest.mark.parametrize("home", [Layout(2), Layout(2, pp=2)], ids=["cp 2", "pp 2"])
def test_mistakes_are_told_on_every_rank(home: Layout) -> None:
    for told in run_ranks(_refusals, 2, home):
        for name, (_, kind, says) in REFUSED.items():
            assert told[name][0] == kind.__name__, (name, told[name])
            with pytest.raises(kind, match=says):
                raise kind(told[name][1])


def _dropout(rank: int) -> str:
    """A set in one micro-batch may drop attention weights, sets in several may not."""
    documents = documents_of()
    with World(Layout(2), backend=backend(), timeout=60) as world:
        model = prepare(deep("qwen3", torch.float64, 2, attention_dropout=0.25), world, probe=False).train()
        plan = plan_fixed(LENGTHS, world.home, cp=2, max_tokens_per_slot=16, targets=targets_of(documents))
        run_step(model, plan, documents, world, loss=policy_loss)
        inside = plan.micro_batches[0].groups[0].documents
        assert run_step(model, plan, documents, world, loss=DocumentLoss(pair_loss, [inside])).forward_twice == 0
        run_step(model, plan, documents, world, loss=DocumentLoss(pair_loss), backward=False)
        with pytest.raises(ModelError) as error:
            run_step(model, plan, documents, world, loss=DocumentLoss(pair_loss))
        return str(error.value)


def test_dropout_is_refused_where_two_passes_must_agree() -> None:
    for message in run_ranks(_dropout, 2):
        assert "1 set of documents in several micro-batches" in message
        assert "set attention_dropout (0.25) to 0.0" in message


def _dropout_of_an_adapter(rank: int, home: Layout) -> list[str]:
    """A set in one micro-batch makes its logits twice, with dropout of the head's adapter where there is one."""
    documents, told = documents_of(), list[str]()
    with World(home, backend=backend(), timeout=60) as world:
        plan = plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=100, targets=targets_of(documents))
        for adapter in ("embedding and head", "attention"):
            model = prepare(adapted("llama", adapter, lora_dropout=0.1), world, probe=False).train()
            run_step(model, plan, documents, world, loss=DocumentLoss(pair_loss), backward=False)
            try:
                told.append(str(run_step(model, plan, documents, world, loss=DocumentLoss(pair_loss)).forward_twice))
            except ModelError as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("home", [Layout(2), Layout(2, pp=2)], ids=["cp 1", "pp 2"])
def test_dropout_of_an_adapted_head_is_refused(home: Layout) -> None:
    for message, steps in run_ranks(_dropout_of_an_adapter, 2, home):
        assert "set lora_dropout (0.1) to 0.0, or leave the head out of the adapter" in message and steps == "0"


# ---- one process: what a loss is given


class Table(torch.nn.Module):
    """A model of the caller's own, which returns logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, shard: object) -> torch.Tensor:
        return self.table(input_ids)


def test_a_model_of_ones_own() -> None:
    documents = documents_of()
    ids = [torch.from_numpy(document[torch.arange(len(document)).numpy()]) for document in documents]
    with World(Layout(1), backend="gloo") as world:
        model, exact = Table(), Table()
        plan = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=40, targets=targets_of(documents))
        result = run_step(model, plan, documents, world, loss=lambda x, at: at["weights"] * x.exp(), loss_chunk_rows=4)
    total = torch.zeros((), dtype=torch.float64)
    for document, tokens in zip(documents, ids, strict=True):
        probabilities = exact.table(tokens[:-1]).softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        positions = torch.arange(len(document)).numpy()
        counted = torch.from_numpy((document.labels(positions) != -100) * document.token_values(positions)["weights"])
        total = total + (probabilities * counted[1:]).sum()
    (total / plan.targets).backward()
    assert result.loss == pytest.approx(total.item() / plan.targets, rel=1e-13)
    torch.testing.assert_close(model.table.weight.grad, exact.table.weight.grad, rtol=1e-12, atol=1e-15)


def test_what_a_loss_is_given() -> None:
    """Rows with a label alone, once each, never none; float32 of a half-precision model; a constant is no error."""
    documents, seen = documents_of(), list[tuple[int, int, int]]()
    dtypes = set[torch.dtype]()

    def loss(log_probs: torch.Tensor, at: Any) -> torch.Tensor:
        assert len(log_probs) == len(at) > 0
        assert at in {at} and at != replace(at)  # tensors have no one truth: rows are equal to themselves alone
        seen.extend(zip(at.document.tolist(), at.position.tolist(), at.target.tolist(), strict=True))
        dtypes.update((log_probs.dtype, at["advantage"].dtype))
        return torch.ones_like(log_probs)

    with World(Layout(1), backend="gloo") as world:
        model = prepare(tiny("qwen3", torch.bfloat16), world, probe=False, shard_parameters=False)
        plan = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=40, targets=targets_of(documents))
        result = run_step(model, plan, documents, world, loss=loss, loss_chunk_rows=3, divisor=2.0)
        assert result.loss == targets_of(documents) / 2 and result.divisor == 2.0 and result.grad_norm == 0
        plain = [Document([1, 2, 3])]
        weights = run_step(model, plan_fixed([3], world.home, cp=1), plain, world, loss=lambda x, at: at["weights"])
        assert weights.loss_sum == 2
    wanted = [
        (number, position - 1, label)
        for number, document in enumerate(documents)
        for position, label in enumerate(document.labels(torch.arange(len(document)).numpy()).tolist())
        if position and label != -100
    ]
    assert sorted(seen) == wanted and dtypes == {torch.float32}


def test_sets_a_micro_batch_at_a_time_sum_the_same_gradient() -> None:
    """Without an optimizer, by the divisor of all: no micro-batch runs forward twice."""
    documents = documents_of()
    loss = DocumentLoss(lambda sums, _: torch.nn.functional.softplus(0.1 * (sums[1] - sums[0])), [(0, 1), (2, 3)])
    with World(Layout(1), backend="gloo") as world:
        models = [
            prepare(deep("qwen3", torch.float64, 1), world, probe=False, shard_parameters=False) for _ in range(2)
        ]
        values = list[float]()
        for part in (documents[:4], documents[4:]):
            plan = plan_fixed([len(document) for document in part], world.home, cp=1, targets=targets_of(part))
            result = run_step(models[0], plan, part, world, loss=loss, divisor=4)
            values.append(result.loss)
            assert result.forward_twice == 0
        plan = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=30, targets=targets_of(documents))
        sets = [(0, 1), (2, 3), (4, 5), (6, 7)]
        whole = run_step(models[1], plan, documents, world, loss=DocumentLoss(loss.function, sets))
        assert whole.forward_twice > 1 and sum(values) == pytest.approx(whole.loss, rel=1e-13)
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-15)

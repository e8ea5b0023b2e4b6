"""What a loss of one's own is given, and may get wrong: one error on every rank, weights as before, nothing hangs."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from longspan import Document, DocumentLoss, Layout, LongspanError, World, plan_fixed, run_step, token_log_probs
from longspan.errors import CommError, DataError, LossError, ModelError
from longspan.testing import backend, run_ranks
from longspan.train import MicroBatchLoss, build_optimizer
from longspan.train.log_probs import DISTRIBUTION_VALUES, distribution_values
from tests.model.deep import deep
from tests.model.lora.adapted import adapted
from tests.model.stock import SIZES, VOCABULARY, prepare_untried, texts, tiny, weights_of
from tests.train.own_loss.dense import LENGTHS, documents_of, micro_batch_loss, pair_loss, policy_loss, targets_of

TEXTS = [Document(ids, loss_mask=np.arange(len(ids)) % 3 > 0) for ids in texts((17, 5, 9))]
TEXT_LENGTHS, TARGETS = [len(d) for d in TEXTS], sum(d.targets for d in TEXTS)
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


OF_SETS: list[tuple[Any, str]] = [  # sets of documents, and what all ranks say of them
    ([0, 1], "set 0 of a DocumentLoss is 0; give"),
    (4, "the sets of a DocumentLoss are 4; give"),
    ([(True, 2)], r"set 0 of .* is \(True, 2\); give"),
    ([(0, 8)], r"\(0, 8\), the plan has documents 0 to 7"),
    ([()], r"set 0 of .* is \(\)"),
    ([(1, 1)], "document of a set once"),
]
OF_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"loss": 3}, r"loss is 3; give a function of \(log_probs, at\)"),
    ({"loss": DocumentLoss(3)}, "the function of a DocumentLoss is 3"),  # type: ignore[arg-type]
    ({"divisor": 0}, "divisor is 0; give a positive number"),
    ({"divisor": float("inf")}, "divisor is inf; give a positive number"),
    ({"loss": lambda x, at: x.sum()}, r"float64 of shape \(\) for \d+ rows"),
    ({"loss": lambda x, at: 0.5}, r"the loss gave float for \d+ rows"),
    ({"loss": lambda x, at: at.target}, "the loss gave torch.int64 of shape"),
    ({"loss": DocumentLoss(lambda sums, _: sums)}, r"float64 of shape \(8,\) for documents"),
    ({"loss": MicroBatchLoss(3)}, "the function of a MicroBatchLoss is 3"),  # type: ignore[arg-type]
    ({"loss": MicroBatchLoss(micro_batch_loss, also=["kl"])}, "also has 'kl'; give a list of some of"),
    ({"loss": MicroBatchLoss(micro_batch_loss, also=None)}, "also has None; give a list of some of"),  # pyright: ignore
    (
        {"loss": MicroBatchLoss(lambda x: x.values["log_probs"])},
        "function of a MicroBatchLoss gave torch.float64 of shape",
    ),
    ({"loss": MicroBatchLoss(lambda x: x.values["top1"].sum(), also=["top1"])}, "has a derivative by top1"),
]
REFUSED: dict[str, tuple[Makes, type[LongspanError], str]] = {  # what is passed on a rank, and what all of them say
    **{f"{sets}": (lambda rank, of=sets: {"loss": DocumentLoss(pair_loss, of)}, LossError, x) for sets, x in OF_SETS},
    **{words: (lambda rank, of=values: of, LossError, words) for values, words in OF_VALUES},
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
    "another function of sets on one rank, inside a micro-batch": (
        lambda rank: {"loss": DocumentLoss(_unlike(rank), [(0,)])}, LossError, "gave other losses or derivatives"
    ),
    "another function of sets on one rank": (
        lambda rank: {"loss": DocumentLoss(_unlike(rank))}, LossError, "gave other losses or derivatives on some ranks"
    ),
    "another function of tokens on one rank, inside a micro-batch": (
        lambda rank: {"loss": MicroBatchLoss(lambda tokens: (1 + 0.01 * rank) * tokens.values["log_probs"].sum())},
        LossError,
        "the function of a MicroBatchLoss gave other losses or derivatives on some ranks",
    ),
    "other values on one rank": (
        lambda rank: {"loss": MicroBatchLoss(micro_batch_loss, also=["entropy", "top1"][: 2 - rank])},
        CommError,
        "2 different losses, sets or",
    ),
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
}  # fmt: skip


def _refuse_mistakes(rank: int, home: Layout, names: Sequence[str]) -> None:
    documents = documents_of()
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare_untried(deep("qwen3", torch.float64, 2), world)
        optimizer, before = build_optimizer(model, "sgd", lr=0.1), weights_of(model)
        degree = min(2, home.slots)
        plan = plan_fixed(LENGTHS, home, cp=degree, max_tokens_per_slot=48 // degree, targets=targets_of(documents))
        wanted = run_step(model, plan, documents, world)
        assert run_step(model, plan, documents, world, divisor=[3, 3.0][rank]).divisor == 3
        run_step(model, plan, documents, world, temperature=[2, 2.0][rank])  # equal numbers are one temperature
        assert run_step(model, plan, documents, world, divisor=torch.tensor([3.0])).divisor == 3  # type: ignore[arg-type]
        for name in names:
            make, kind, says = REFUSED[name]
            if home.pp > 1 and (name.endswith("inside a micro-batch") or name.startswith("the loss gave")):
                continue  # the last stage is one rank
            with pytest.raises(kind, match=says) as error:
                run_step(model, plan, documents, world, optimizer, **make(rank))
            assert error.type is kind, name
        after = weights_of(model)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        norm = run_step(model, plan, documents, world, optimizer).grad_norm
        assert norm == pytest.approx(wanted.grad_norm, rel=1e-12)


def _refuse_dropout(home: Layout) -> None:
    """A set in one micro-batch may drop attention weights, sets in several may not; nor may an adapter of the head.

    Its logits are made twice, with dropout of the head's adapter where there is one.
    """
    documents, sets = documents_of(), DocumentLoss(pair_loss)
    with World(home, backend=backend(), timeout=60) as world:
        targets = targets_of(documents)
        if home.pp == 1:
            model = prepare_untried(deep("qwen3", torch.float64, 2, attention_dropout=0.25), world).train()
            plan = plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=16, targets=targets)
            run_step(model, plan, documents, world, loss=policy_loss)
            inside = plan.micro_batches[0].groups[0].documents
            assert run_step(model, plan, documents, world, loss=DocumentLoss(pair_loss, [inside])).forward_twice == 0
            run_step(model, plan, documents, world, loss=sets, backward=False)
            with pytest.raises(ModelError, match=r"1 set of documents in several micro-batches") as error:
                run_step(model, plan, documents, world, loss=sets)
            assert "set attention_dropout (0.25) to 0.0" in str(error.value)
        plan = plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=100, targets=targets)
        model = prepare_untried(adapted("llama", "embedding and head", lora_dropout=0.1), world).train()
        run_step(model, plan, documents, world, loss=sets, backward=False)
        said = r"set lora_dropout \(0.1\) to 0.0, or leave the head out of the adapter"
        with pytest.raises(ModelError, match=said):
            run_step(model, plan, documents, world, loss=sets)
        if home.pp == 1:
            model = prepare_untried(adapted("llama", "attention", lora_dropout=0.1), world).train()
            assert run_step(model, plan, documents, world, loss=sets).forward_twice == 0


def _refuse_numbers(rank: int) -> None:
    kept = list[Any]()

    def keep(log_probs: torch.Tensor, at: Any) -> torch.Tensor:
        assert not at.entropy.requires_grad and at.entropy is at.entropy
        kept.append(at)
        return -log_probs

    with World(Layout(2), backend=backend()) as world:
        model = prepare_untried(deep("qwen3", torch.float64, 1), world)
        plan = plan_fixed(TEXT_LENGTHS, world.home, cp=2, targets=TARGETS)
        for names, said in (
            (["entropy"] if rank else [], "different lists also= for step"),
            (["entropy", "kl"], "also has 'kl'; give a list of some of entropy"),
            ("entropy", "also has 'entropy'; give a"),
        ):
            with pytest.raises((CommError, LossError), match=said):
                token_log_probs(model, plan, TEXTS, world, also=names)
        run_step(model, plan, TEXTS, world, loss=keep)
        assert kept[0].entropy.shape == kept[0].position.shape
        with pytest.raises(LossError, match=r"at.top1 is read after the loss has returned"):
            _ = kept[0].top1
        with pytest.raises(LossError, match=r"'top1' of tokens was not asked for \(these were: none\)"):
            token_log_probs(model, plan, TEXTS, world).value("top1", 0)


def _refuse(rank: int) -> None:
    _refuse_mistakes(rank, Layout(2), [*REFUSED])
    _refuse_mistakes(rank, Layout(2, pp=2), [*REFUSED][::3])
    _refuse_dropout(Layout(2))
    _refuse_numbers(rank)


def _refuse_over_stages(rank: int) -> None:
    _refuse_mistakes(rank, Layout(2, pp=2), [*REFUSED])
    _refuse_dropout(Layout(2, pp=2))


@pytest.mark.parametrize("refuse", [_refuse, pytest.param(_refuse_over_stages, marks=pytest.mark.whole)])
def test_mistakes_are_told_on_every_rank(refuse: Callable[[int], None]) -> None:
    run_ranks(refuse, 2)


# ---- one process: what a loss is given


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, shard: object) -> torch.Tensor:
        return self.table(input_ids)


def test_a_model_of_ones_own() -> None:
    documents = documents_of()
    with World(Layout(1), backend="gloo") as world:
        model, exact = Table(), Table()
        plan = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=40, targets=targets_of(documents))
        result = run_step(model, plan, documents, world, loss=lambda x, at: at["weights"] * x.exp(), loss_chunk_rows=4)
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        tokens, positions = torch.from_numpy(document.ids), np.arange(len(document))
        probabilities = exact.table(tokens[:-1]).softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        counted = torch.from_numpy((document.labels() != -100) * document.token_values(positions)["weights"])
        total = total + (probabilities * counted[1:]).sum()
    (total / plan.targets).backward()
    assert result.loss == pytest.approx(total.item() / plan.targets, rel=1e-13)
    torch.testing.assert_close(model.table.weight.grad, exact.table.weight.grad, rtol=1e-12, atol=1e-15)


def test_what_a_loss_is_given() -> None:
    documents, seen = documents_of(), list[tuple[int, int, int]]()
    dtypes = set[torch.dtype]()

    def loss(log_probs: torch.Tensor, at: Any) -> torch.Tensor:
        assert len(log_probs) == len(at) > 0
        assert at in {at} and at != replace(at)  # tensors have no one truth: rows are equal to themselves alone
        seen.extend(zip(at.document.tolist(), at.position.tolist(), at.target.tolist(), strict=True))
        dtypes.update((log_probs.dtype, at["advantage"].dtype))
        return torch.ones_like(log_probs)

    with World(Layout(1), backend="gloo") as world:
        model = prepare_untried(tiny("qwen3", torch.bfloat16), world, shard_parameters=False)
        plan = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=40, targets=targets_of(documents))
        result = run_step(model, plan, documents, world, loss=loss, loss_chunk_rows=3, divisor=2.0)
        assert result.loss == targets_of(documents) / 2 and result.divisor == 2.0 and result.grad_norm == 0
        plain = [Document([1, 2, 3])]
        weights = run_step(model, plan_fixed([3], world.home, cp=1), plain, world, loss=lambda x, at: at["weights"])
        assert weights.loss_sum == 2
    wanted = [
        (number, position - 1, label)
        for number, document in enumerate(documents)
        for position, label in enumerate(document.labels().tolist())
        if position and label != -100
    ]
    assert sorted(seen) == wanted and dtypes == {torch.float32}


# ---- entropy and other numbers of distributions


def test_by_definition_with_tokens_that_cannot_come_and_equal_logits() -> None:
    logits = torch.tensor([[1.0, 1.0, -torch.inf], [0.0, 2.0, 1.0]], dtype=torch.bfloat16)
    names = ("entropy", "top1", "log_sum_sq_probs")
    values = distribution_values(logits, torch.tensor([1, 1]), names)
    p = torch.tensor([[0.5, 0.5, 0.0], *logits[1:].double().softmax(-1).tolist()])
    assert values.dtype == torch.float32 and values.shape == (3, 2)
    assert torch.allclose(values[0], torch.special.entr(p).sum(-1))
    assert values[1].tolist() == [0, 1]  # of two equal tokens the first is the likeliest
    assert torch.allclose(values[2], (p**2).sum(-1).log())
    assert distribution_values(logits[:0], torch.zeros(0, dtype=torch.long), names).shape == (3, 0)


def test_as_trl_defines_them() -> None:
    config = Gemma2Config(**SIZES, final_logit_softcapping=0.5, sliding_window=4, hidden_activation="gelu")
    utils = pytest.importorskip("trl.trainer.utils")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.get_output_embeddings().weight.data *= 30  # else a cap changes nothing
    with World(Layout(1), backend="gloo") as world:
        prepared = prepare_untried(deepcopy(model), world)
        plan = plan_fixed(TEXT_LENGTHS, world.home, cp=1, targets=TARGETS)
        values = token_log_probs(prepared, plan, TEXTS, world, also=DISTRIBUTION_VALUES)
    names = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
    utils.add_fused_lm_head(model, outputs=names)
    for d, document in enumerate(TEXTS):
        ids, labels = (torch.from_numpy(x)[None] for x in (document.ids, document.labels()))
        with torch.no_grad():
            stock = model(input_ids=ids, labels=labels, fused_lm_head=True)
        ours = [values.of(d), *(values.value(name, d) for name in DISTRIBUTION_VALUES)]
        for name, own in zip(names, ours, strict=True):
            assert np.allclose(own[1:], getattr(stock, name)[0].double().numpy(), rtol=1e-5, atol=1e-5), name
    assert values.of(0).std() > 0.1  # the rows differ


def test_a_loss_of_micro_batches_takes_whole_ones_and_one_score() -> None:
    loss, home = MicroBatchLoss(micro_batch_loss), Layout(2)
    with pytest.raises(LossError, match=r"the plan is free; use mode=.lockstep."):
        loss.check(plan_fixed([8, 8], home, cp=1, mode="free"), 0)
    with pytest.raises(LossError, match="this one has 3 scores"):
        loss.check(plan_fixed([8, 8], home, cp=1), 3)

"""Labels are shifted inside documents before they are split; the loss of a few rows at a time is that of all logits.

Labels of one's own and masks count alike in steps, plans and evaluations.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from bench.training.live_bytes import LiveBytes
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PhiConfig, PhiForCausalLM

from longspan import Document
from longspan.comm import SequenceShard, World
from longspan.data.document import NO_TARGET, count_targets
from longspan.errors import DataError, ModelError, PlanError
from longspan.evaluation import evaluate
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.seams.row_loss import OutputHead
from longspan.plan import Group, MicroBatch, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import PlannerConfig, run_step
from longspan.train.log_probs import uses_softmax_kernels
from longspan.train.loss import (
    Targets,
    chunked_loss,
    cross_entropy,
    rows_per_chunk,
    summed_cross_entropy,
)
from longspan.train.rows.read_rows import read_inputs_and_labels
from tests import parity
from tests.model.stock import VOCABULARY, error, gradients_of, prepare_untried, stock_answer, texts, tiny, worst
from tests.train.own_loss.dense import answer, rows_of, weighted

CPU = torch.device("cpu")


class Recorder:
    """A document that remembers which positions were asked for."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.asked = tokens, Counter[int]()

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        assert positions.dtype == np.int64
        self.asked.update(positions.tolist())
        return self.tokens[positions]


def groups_of(draw: st.DrawFn) -> tuple[MicroBatch, int]:
    slots = draw(st.integers(1, 5))
    groups, first = [], 0
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.permutations(range(slots)))[: draw(st.integers(1, slots))]
        lengths = tuple(draw(st.lists(st.integers(1, 23), min_size=1, max_size=4)))
        documents = tuple(range(first, first + len(lengths)))
        first += len(lengths)
        kind = draw(st.sampled_from(["zigzag", "contiguous"]))
        pad_to = draw(st.sampled_from([None, max(lengths), max(lengths) + 3]))
        groups.append(Group(tuple(members), documents, lengths, partition=kind, pad_to=pad_to))
    return MicroBatch(tuple(groups)), slots


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ids_labels_and_what_is_read(data: st.DataObject) -> None:
    micro_batch, slots = groups_of(data.draw)
    texts = [np.arange(n, dtype=np.int32) + 1000 * (d + 1) for d, n in enumerate(micro_batch.lengths)]
    labels_of: dict[int, int] = {}
    for slot in range(slots):
        documents = [Recorder(text) for text in texts]
        shard = SequenceShard(micro_batch, slot, 0, CPU).with_padding(minimum=3, multiple=2)
        ids, labels = read_inputs_and_labels(documents, shard, vocabulary=10**6)
        real = shard.rows.numpy() >= 0
        assert (ids[~real] == 0).all() and (labels[~real] == NO_TARGET).all()
        packed = np.concatenate(texts)
        assert (ids[real] == packed[shard.rows.numpy()[real]]).all()
        for token, label in zip(ids[real].tolist(), labels[real].tolist(), strict=True):
            assert token not in labels_of
            labels_of[token] = label
        asked = {1000 * (d + 1) + p for d, document in enumerate(documents) for p in document.asked}
        own = set(ids[real].tolist())
        assert asked <= own | {token + 1 for token in own}
    wanted = {token: token + 1 for text in texts for token in text.tolist()}
    wanted |= {int(text[-1]): NO_TARGET for text in texts}
    assert labels_of == wanted


def test_loss_is_a_sum_over_targets_in_float32_at_least() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 11, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.tensor([3, NO_TARGET, 0, 10, NO_TARGET, 5, 1])
    total = summed_cross_entropy(logits, labels)
    (total / 5).backward()
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact, labels, ignore_index=NO_TARGET)
    wanted.backward()
    assert total.dtype == torch.float64 and total.item() / 5 == pytest.approx(wanted.item(), rel=1e-6)
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-2, atol=1e-2)
    assert (logits.grad[[1, 4]] == 0).all()


class Short:
    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        return np.zeros(len(positions) - 1, dtype=np.int64)


def test_what_is_read_is_checked_and_may_be_of_any_kind() -> None:
    shard = SequenceShard(MicroBatch((Group((0,), (7,), (4,)),)), 0, 0, CPU)
    for document, says in (
        (np.array([1, 2, 50, 3]), "document 7 holds token id 50 at position 2, .* is 0 to 49"),
        (np.array([1, -1, 2, 3]), "document 7 holds token id -1 at position 1"),
        (np.array([1.0, 2.0, 3.0, 4.0]), "document 7 gave float64 of shape"),
        (Short(), r"document 7 gave int64 of shape \(3,\) for 4 positions"),
    ):
        with pytest.raises(DataError, match=says):
            read_inputs_and_labels({7: document}, shard, vocabulary=50)
    shard = SequenceShard(MicroBatch((Group((1, 0), (0,), (5,)),)), 0, 0, CPU)
    of_kinds = [read_inputs_and_labels([make([4, 5, 6, 7, 8])], shard) for make in (np.array, list, torch.tensor)]
    for ids, labels in of_kinds[1:]:
        assert (ids == of_kinds[0][0]).all() and (labels == of_kinds[0][1]).all() and len(ids)


# ---- a few rows at a time

SIZE, CLASSES = 16, 37
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass
class Plain:
    linear: nn.Linear
    cap: float | None = None
    makes_scores: bool = False

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for p in self.linear.parameters() if p.requires_grad)

    @property
    def vocabulary(self) -> int:
        return self.linear.out_features

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def _drawn(rows: int, dtype: torch.dtype, *, bias: bool = False) -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, SIZE, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, (rows,))
    labels[::3] = NO_TARGET
    return hidden, labels, nn.Linear(SIZE, CLASSES, bias=bias, dtype=dtype)


def chunked_cross_entropy(hidden: Tensor, labels: Tensor, head: Plain, rows: int) -> Tensor:
    predicting = torch.nonzero(labels != NO_TARGET).squeeze(1)
    return chunked_loss(hidden, Targets(predicting, labels[predicting]), cross_entropy, head, rows)


def _whole(hidden: Tensor, labels: Tensor, head: Plain) -> Tensor:
    return F.cross_entropy(head(hidden), labels, ignore_index=NO_TARGET, reduction="sum")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, None), (True, 0.7)])
def test_loss_and_gradients_are_those_of_all_logits(
    dtype: torch.dtype, rows: int, bias: bool, cap: float | None
) -> None:
    hidden, labels, linear = _drawn(11, dtype, bias=bias)
    head, inputs = Plain(linear, cap), (hidden, *linear.parameters())
    wanted = _whole(hidden, labels, head)
    found = chunked_cross_entropy(hidden, labels, head, rows)
    with torch.no_grad():
        alone = chunked_cross_entropy(hidden, labels, head, rows)
    loss_bound = 1e-12 if dtype == torch.float64 else 1e-6
    assert abs(found.item() / wanted.item() - 1) < loss_bound and alone.item() == pytest.approx(found.item(), rel=1e-14)
    gradients = torch.autograd.grad(found / 7, inputs), torch.autograd.grad(wanted / 7, inputs)
    for a, b in zip(*gradients, strict=True):
        assert error(a, b) < TOLERANCE[dtype]


def test_frozen_parts_get_no_gradient() -> None:
    hidden, labels, linear = _drawn(9, torch.float64)
    wanted = torch.autograd.grad(_whole(hidden, labels, Plain(linear)), (hidden, linear.weight))
    chunked_cross_entropy(hidden.detach(), labels, Plain(linear), 2).backward()
    assert linear.weight.grad is not None and error(linear.weight.grad, wanted[1]) < 1e-12
    linear.requires_grad_(False)
    chunked_cross_entropy(hidden, labels, Plain(linear), 2).backward()
    assert hidden.grad is not None and error(hidden.grad, wanted[0]) < 1e-12
    assert not chunked_cross_entropy(hidden.detach(), labels, Plain(linear), 2).requires_grad


def test_rows_without_any_label_give_zeros() -> None:
    logits = torch.randn(1, 5, requires_grad=True)
    total = summed_cross_entropy(logits, torch.tensor([NO_TARGET]))
    total.backward()
    assert total.item() == 0.0 and logits.grad is not None and (logits.grad == 0).all()
    hidden, labels, linear = _drawn(5, torch.float64)
    loss = chunked_cross_entropy(hidden, torch.full_like(labels, NO_TARGET), Plain(linear), 2)
    loss.backward()
    assert loss.item() == 0 and hidden.grad is not None and not hidden.grad.any()
    assert linear.weight.grad is not None and not linear.weight.grad.any()


def test_gradients_of_a_low_precision_head_are_summed_in_float32() -> None:
    """512 chunks: summed in bfloat16, the gradient of the head would be off by several per cent."""
    hidden, labels, linear = _drawn(512, torch.bfloat16)
    chunked_cross_entropy(hidden, labels, Plain(linear), 1).backward()
    exact = nn.Linear(SIZE, CLASSES, bias=False, dtype=torch.float64)
    exact.weight.data.copy_(linear.weight.data)
    (wanted,) = torch.autograd.grad(_whole(hidden.detach().double(), labels, Plain(exact)), (exact.weight,))
    assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.bfloat16
    assert ((linear.weight.grad.double() - wanted).norm() / wanted.norm()).item() < 0.006


def test_logits_of_all_rows_never_exist() -> None:
    rows, vocabulary, size, chunk = 1024, 2048, 32, 64
    head = Plain(nn.Linear(size, vocabulary, bias=False))
    hidden, labels = torch.randn(rows, size, requires_grad=True), torch.randint(0, vocabulary, (rows,))
    with LiveBytes() as counted:
        chunked_cross_entropy(hidden, labels, head, chunk).backward()
    logits = 4 * chunk * vocabulary
    small = 4 * (4 * vocabulary * size + 3 * rows * size)  # gradients of the head, of hidden states
    assert logits < counted.peak < 3 * logits + small < 4 * rows * vocabulary / 2, counted.peak / logits


def test_rows_of_a_chunk_fit_its_bytes() -> None:
    copied = 0 if uses_softmax_kernels(torch.bfloat16, "cuda") else 4
    assert rows_per_chunk(151936, torch.bfloat16, "cuda") == (2 << 30) // (151936 * (4 + copied))
    assert rows_per_chunk(151936, torch.float64, "cuda") == (2 << 30) // (151936 * 24)
    assert rows_per_chunk(2048, torch.float32, "cpu") == (64 << 20) // (2048 * 12)
    assert rows_per_chunk(1 << 40, torch.float64, "cpu") == 1


FEW = (13, 1, 30, 7)
FAMILIES = (
    *((family, torch.float32, True) for family in ("gemma2", "qwen3-moe", "gpt-oss")),
    ("qwen3", torch.float64, True),
    ("llama", torch.float64, False),
)


def test_families_under_fsdp_equal_the_stock_model() -> None:
    home, documents, cases = Layout(ranks=2), texts(FEW), dict[str, parity.Case]()
    plan = plan_fixed(FEW, home, cp=2)
    for family, dtype, sharded in FAMILIES:
        cases[family] = parity.Case(
            partial(tiny, family, dtype, attention="eager"),
            home,
            {"cp 2": plan},
            documents,
            stock_answer(family, dtype, documents),
            parity.WIDE if dtype == torch.float64 else parity.SINGLE,
            {"shard_parameters": sharded},
            {"loss_chunk_rows": 3},
            evaluation=plan,
        )
    parity.check(cases)


PHI = PhiConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=61)


class Beside(PhiForCausalLM):
    """Logits depend on a parameter that is neither the base model's nor the head's."""

    def __init__(self, config: PhiConfig) -> None:
        super().__init__(config)
        self.temperature = nn.Parameter(torch.ones(()))


def test_a_head_has_its_bias_and_one_that_depends_on_more_is_refused() -> None:
    with World(Layout(ranks=1), backend="gloo") as world:
        model = prepare(PhiForCausalLM(PHI), world, shard_parameters=False)
        hidden = torch.randn(5, 32)
        model.lm_head.bias.data.normal_()
        seen = OutputHead(model, type(model).forward)
        assert torch.equal(seen(hidden), model.lm_head(hidden)) and len(seen.parameters) == 2
        with pytest.raises(ModelError, match=r"beside.*temperature"):
            prepare(Beside(PHI), world, shard_parameters=False)


# ---- documents with labels, masks and values

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)


def masked() -> list[Any]:
    draw = np.random.default_rng(0)
    documents = list[Any](texts(LENGTHS))
    for d in (0, 2, 5, 7):
        documents[d] = Document(documents[d], loss_mask=draw.random(LENGTHS[d]) < 0.4)
    documents[3] = Document(documents[3], loss_mask=np.zeros(7))
    labels = np.where(draw.random(5) < 0.6, draw.integers(0, VOCABULARY, 5), -100)
    documents[6] = Document(documents[6], labels=labels)
    return documents


def _steps(rank: int) -> dict[str, tuple[float, ...]]:
    documents, errors = masked(), dict[str, tuple[float, ...]]()
    with World(Layout(ranks=4), backend=backend()) as world:
        stock = tiny("qwen3", torch.float64).to(world.device)
        as_labelled = [x if isinstance(x, Document) else Document(x) for x in documents]
        count = sum(count_targets(x) for x in documents)
        loss, gradients = answer(stock, rows_of(stock, as_labelled), weighted, count)
        model = prepare_untried(tiny("qwen3", torch.float64), world)
        plans = {"cp 2": plan_fixed(LENGTHS, world.home, cp=2, targets=count)}
        plans["free"] = plan_dynamic(LENGTHS, world.home, targets=count, max_tokens_per_slot=16, mode="free")
        for name, plan in plans.items():
            result = run_step(model, plan, documents, world)
            assert result.targets == count
            errors[name] = abs(result.loss / loss - 1), worst(gradients_of(model), gradients)
            model.zero_grad()
        for choice in (PlannerConfig.fixed(4), PlannerConfig.dynamic(max_tokens_per_slot=16)):
            result = evaluate(model, documents, choice, world)
            assert result.targets == count == result.metrics["token_accuracy"].count
            assert [int(mean.count) for mean in result.document_losses] == [count_targets(d) for d in documents]
            errors[choice.planner] = (abs(result.loss / loss - 1),)
        with pytest.raises(PlanError, match=rf"by 77 targets, its 8 documents predict {count} tokens; plan with"):
            run_step(model, plan_fixed(LENGTHS, world.home, cp=2), documents, world)
        for rows in (2, 1):  # one micro-batch, and one for each document
            plan = plan_fixed((3, 4), world.home, cp=4, max_tokens_per_slot=rows)
            assert len(plan.micro_batches) == 3 - rows
            with pytest.raises(DataError, match="document 0 has 'advantage' and document 1 has not"):
                run_step(model, plan, [Document([5, 7, 9], advantage=1.0), Document([1, 2, 3, 4])], world)
        said = r"document 0 is a dict of input_ids, labels; give its token ids, or longspan.Document\("
        with pytest.raises(PlanError, match=said):
            run_step(model, plan, [{"input_ids": [5, 7, 9], "labels": [5, 7, 9]}] * 2, world)
    return errors


def test_masked_tokens_are_no_targets_and_documents_of_a_step_have_the_same_values() -> None:
    for errors in run_ranks(_steps, 4):
        assert all(max(of_plan) < 1e-12 for of_plan in errors.values()), errors


def test_what_a_document_says() -> None:
    document = Document([5, 7, 9, 2], labels=[-100, -100, 9, 3], weights=[0, 0, 1, 0.5], advantage=-0.25)
    positions = np.array([1, 3])
    assert len(document) == 4 and document.targets == 2 and document[positions].tolist() == [7, 2]
    assert document.labels(positions).tolist() == [-100, 3]
    values = {name: numbers.tolist() for name, numbers in document.token_values(positions).items()}
    assert values == {"weights": [0, 0.5], "advantage": [-0.25, -0.25]}
    assert Document([5, 7, 9], loss_mask=[1, 0, 1]).targets == 1
    assert count_targets(Document([5])) == 0 == count_targets([])
    old = torch.tensor([0.5, 1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    document = Document(torch.tensor([5, 7, 9]), loss_mask=torch.tensor([True, False, True]), old=old, weights=old)
    assert document.token_values(np.arange(3))["old"].tolist() == [0.5, 1.0, -2.0] and document.targets == 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": [1, 2]}, "2 labels for 3 token ids"),
    "both": ({"labels": [1, 2, 3], "loss_mask": [1, 1, 1]}, "give one of them"),
    "floats": ({"labels": [1.0, 2.0, 3.0]}, r"labels of a document are float64 of shape \(3,\); give integers"),
    "ragged": ({"loss_mask": [[1], [1, 0]]}, r"loss_mask of a document is \[\[1\], \[1, 0\]\], which is no array"),
    "ragged numbers": ({"advantage": [[1], [1, 0]]}, "'advantage' of a document is .*, which is no array"),
    "parts": ({"loss_mask": [0.5, 1, 1]}, "what counts by parts is weights="),
    "mask": ({"loss_mask": [1, 1]}, r"loss_mask has 2 values for 3 token ids"),
    "weights": ({"weights": [1, 1]}, r"'weights' of a document has shape \(2,\), the document 3 tokens"),
    "words": ({"advantage": "much"}, "'advantage' of a document is 'much'; give a number"),
    "nan": ({"advantage": float("nan")}, "'advantage' of a document has values that are not finite"),
}


def test_what_does_not_fit_is_refused() -> None:
    for values, message in WRONG.values():
        with pytest.raises(DataError, match=message):
            Document([5, 7, 9], **values)
    with pytest.raises(DataError) as raised:  # long values are cut
        Document([5] * 500, advantage=["much"] * 500)
    assert len(str(raised.value)) < 300

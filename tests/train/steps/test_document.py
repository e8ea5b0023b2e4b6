"""Documents with labels: what they say, what they refuse, and that a step, a plan and an evaluation count alike."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from longspan import Document, Layout, World, evaluate, plan_dynamic, plan_fixed, prepare, run_step
from longspan.data.document import target_count
from longspan.errors import DataError, PlanError
from longspan.testing import backend, run_ranks
from longspan.train import PlanChoice
from tests.model.stock import VOCABULARY, gradients_of, prepare_untried, texts, tiny, worst

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)


def masked() -> list[Any]:
    """Documents with a mask, with labels of other tokens, with every token masked, and plain ones."""
    draw = np.random.default_rng(0)
    documents = list[Any](texts(LENGTHS))
    for d in (0, 2, 5, 7):
        documents[d] = Document(documents[d], loss_mask=draw.random(LENGTHS[d]) < 0.4)
    documents[3] = Document(documents[3], loss_mask=np.zeros(7))
    labels = np.where(draw.random(5) < 0.6, draw.integers(0, VOCABULARY, 5), -100)
    documents[6] = Document(documents[6], labels=labels)
    return documents


def dense(documents: list[Any], device: torch.device) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, targets and gradients of the stock model in one process, a document at a time."""
    model, total, count = tiny("qwen3", torch.float64).to(device), torch.zeros((), dtype=torch.float64), 0
    total = total.to(device)
    for document in documents:
        positions = np.arange(len(document))
        ids = np.asarray(document)[positions] if isinstance(document, list) else document[positions]
        labels = document.labels(positions) if isinstance(document, Document) else np.asarray(ids)
        logits = model(input_ids=torch.as_tensor(ids, device=device)[None]).logits[0, :-1]
        wanted = torch.as_tensor(labels[1:], device=device)
        total = total + F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        count += int((wanted != -100).sum())
    (total / count).backward()
    return float(total / count), count, gradients_of(model)


def _steps(rank: int) -> dict[str, tuple[float, ...]]:
    documents, errors = masked(), dict[str, tuple[float, ...]]()
    with World(Layout(ranks=4), backend=backend()) as world:
        loss, count, gradients = dense(documents, world.device)
        model = prepare_untried(tiny("qwen3", torch.float64), world)
        plans = {f"cp {cp}": plan_fixed(LENGTHS, world.home, cp=cp, targets=count) for cp in (1, 2, 4)}
        for mode in ("lockstep", "free"):
            plans[mode] = plan_dynamic(LENGTHS, world.home, targets=count, max_tokens_per_slot=16, mode=mode)
        for name, plan in plans.items():
            result = run_step(model, plan, documents, world)
            assert result.targets == count
            errors[name] = abs(result.loss / loss - 1), worst(gradients_of(model), gradients)
            model.zero_grad()
        for choice in (PlanChoice.fixed(4), PlanChoice.dynamic(max_tokens_per_slot=16)):
            result = evaluate(model, documents, choice, world)
            assert result.targets == count == result.metrics["token_accuracy"].count
            assert [int(mean.count) for mean in result.document_losses] == [target_count(d) for d in documents]
            errors[choice.planner] = (abs(result.loss / loss - 1),)
        with pytest.raises(PlanError, match=rf"by 77 targets, its 8 documents predict {count} tokens; plan with"):
            run_step(model, plan_fixed(LENGTHS, world.home, cp=2), documents, world)
    return errors


def test_masked_tokens_are_no_targets() -> None:
    for errors in run_ranks(_steps, 4):
        assert all(max(of_plan) < 1e-12 for of_plan in errors.values()), errors


def test_what_a_document_says() -> None:
    document = Document([5, 7, 9, 2], labels=[-100, -100, 9, 3], weights=[0, 0, 1, 0.5], advantage=-0.25)
    positions = np.array([1, 3])
    assert len(document) == 4 and document.targets == 2 and document[positions].tolist() == [7, 2]
    assert document.labels(positions).tolist() == [-100, 3]
    values = {name: numbers.tolist() for name, numbers in document.token_values(positions).items()}
    assert values == {"weights": [0, 0.5], "advantage": [-0.25, -0.25]}
    assert Document([5, 7, 9], loss_mask=[1, 0, 1]).targets == 1 and target_count(Document([5])) == 0 == target_count(
        []
    )


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


@pytest.mark.parametrize("given, message", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Document([5, 7, 9], **given)


def test_messages_cut_long_values() -> None:
    with pytest.raises(DataError) as raised:
        Document([5] * 500, advantage=["much"] * 500)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_floating_type_are_values(dtype: torch.dtype) -> None:
    values = torch.tensor([0.5, 1.0, -2.0], dtype=dtype, requires_grad=True)
    document = Document(
        torch.tensor([5, 7, 9]), loss_mask=torch.tensor([True, False, True]), old=values, weights=values
    )
    assert document.token_values(np.arange(3))["old"].tolist() == [0.5, 1.0, -2.0] and document.targets == 1


def _mixed(rank: int) -> list[str]:
    documents, messages = [Document([5, 7, 9], advantage=1.0), Document([1, 2, 3, 4])], list[str]()
    with World(Layout(ranks=2), backend=backend()) as world:
        model = prepare(tiny("qwen3"), world)
        for rows in (10, 2):  # one micro-batch, and one for each document
            plan = plan_fixed((3, 4), world.home, cp=2, max_tokens_per_slot=rows)
            assert len(plan.micro_batches) == (1 if rows == 10 else 2)
            with pytest.raises(DataError) as raised:
                run_step(model, plan, documents, world)
            messages.append(str(raised.value))
        with pytest.raises(PlanError) as refused:
            run_step(model, plan, [{"input_ids": [5, 7, 9], "labels": [5, 7, 9]}] * 2, world)
        return [*messages, str(refused.value)]


def test_documents_of_a_step_have_the_same_values() -> None:
    for *messages, of_dictionaries in run_ranks(_mixed, 2):
        assert all("document 0 has 'advantage' and document 1 has not" in message for message in messages)
        assert "document 0 is a dict of input_ids, labels; give its token ids, or longspan.Document(" in of_dictionaries

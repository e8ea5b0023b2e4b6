"""Fine-tuning on chats: loss and gradients of a step are those of the stock model in one process.

The reference reads the stock tokenizer's tokens and the mask of a template that marks what is generated; the step reads
rows encoded with the template as it is published, whose turns are searched for.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from longspan import Document, Layout, Plan, World, plan_dynamic, plan_fixed, prepare, run_step
from longspan.corpus.rows.sample import Row, Sample
from longspan.data.document import target_count
from longspan.testing import backend, run_ranks
from tests.corpus.rows.conversations import chats
from tests.corpus.rows.families import encoding_of, write_folder
from tests.corpus.rows.test_marks import marked_template
from tests.model.deep import deep
from tests.model.stock import error, gradients_of

CHATS = list(chats(8, tools=False))
VOCABULARY = 320
HOMES: dict[int, dict[str, Layout]] = {
    4: {"slots": Layout(ranks=4), "pp 2": Layout(ranks=4, pp=2), "tp 2": Layout(ranks=4, tp=2)},
    3: {"slots": Layout(ranks=3)},
}


class Reference(NamedTuple):
    """What the stock model says of documents that it sees one by one."""

    loss: float
    targets: int
    gradients: dict[str, Tensor]


def model_of() -> Any:
    return deep("qwen3", torch.float64, layers=2, vocabulary=VOCABULARY)


def reference_of(pairs: list[tuple[list[int], list[int]]]) -> Reference:
    """The reference of token ids and masks of documents."""
    model, total, count = model_of(), torch.zeros((), dtype=torch.float64), 0
    for ids, mask in pairs:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        labels = torch.where(torch.tensor(mask) == 1, torch.tensor(ids), -100)[1:]
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += sum(mask[1:])
    (total / count).backward()
    return Reference((total.detach() / count).item(), count, gradients_of(model))


def stock_pairs(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and masks of the conversations by transformers alone."""
    stock: Any = AutoTokenizer.from_pretrained(folder)
    out = [stock.apply_chat_template(c.messages, return_assistant_tokens_mask=True, return_dict=True) for c in CHATS]
    return [(one["input_ids"], one["assistant_masks"]) for one in out]


def documents_of(folder: Path) -> list[Document]:
    """The conversations as this package encodes them."""
    samples = encoding_of(folder).encode([Row(f"line {i}", chat.row) for i, chat in enumerate(CHATS)])
    return [Document(s.ids, labels=s.labels) for s in samples if isinstance(s, Sample)]


def plans_of(home: Layout, lengths: list[int], targets: int) -> dict[str, Plan]:
    degrees = [cp for cp in (1, 2, 3, 4) if home.slots % cp == 0]
    plans = {f"cp {cp}": plan_fixed(lengths, home, cp=cp, targets=targets) for cp in degrees}
    cap = -(-max(lengths) // 2)
    plans["dynamic"] = plan_dynamic(lengths, home, targets=targets, max_tokens_per_slot=cap)
    return plans


def _steps(rank: int, ranks: int, folder: Path, wanted: Reference) -> dict[str, float]:
    """The largest relative error of the loss and of any gradient, by home and plan."""
    documents, errors = documents_of(folder), dict[str, float]()
    lengths, targets = [len(document) for document in documents], sum(map(target_count, documents))
    assert targets == wanted.targets
    for name, home in HOMES[ranks].items():
        with World(home, backend=backend(), timeout=60) as world:
            model = prepare(model_of(), world, probe=False)
            for kind, plan in plans_of(home, lengths, targets).items():
                loss = run_step(model, plan, documents, world).loss
                found = gradients_of(model)
                assert found
                worst = max(error(found[key], wanted.gradients[key]) for key in found)
                errors[f"{name}, {kind}"] = max(abs(loss / wanted.loss - 1), worst)
                model.zero_grad()
    return errors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tokenizer with a template as it is published, and with one that marks what is generated."""
    made = tmp_path_factory.mktemp("parity")
    marked = write_folder(made / "marked", "phi3", template=marked_template("phi3"))
    return write_folder(made / "stock", "phi3"), marked


@pytest.mark.parametrize("ranks", [4, pytest.param(3, marks=pytest.mark.whole)])
def test_a_step_on_chats_is_that_of_the_stock_model(folders: tuple[Path, Path], ranks: int) -> None:
    wanted = reference_of(stock_pairs(folders[1]))
    for errors in run_ranks(_steps, ranks, ranks, folders[0], wanted):
        assert len(errors) == (4 + 3 + 3 if ranks == 4 else 3)
        assert max(errors.values()) < 1e-12, errors


def test_a_mask_that_is_forgotten_or_shifted_is_seen(folders: tuple[Path, Path]) -> None:
    pairs = stock_pairs(folders[1])
    wanted = reference_of(pairs)
    forgotten = [(ids, [1] * len(ids)) for ids, _ in pairs]
    shifted = [(ids, np.roll(mask, 1).tolist()) for ids, mask in pairs]
    for wrong in (forgotten, shifted):
        other = reference_of(wrong)
        assert abs(other.loss / wanted.loss - 1) > 1e-4
        assert max(error(other.gradients[key], wanted.gradients[key]) for key in wanted.gradients) > 1e-4

"""A step of examples/dpo.py and of examples/grpo.py: a stock model that sees documents one by one says the same."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from longspan import Document, Layout, World, load_model, prepare, run_step
from longspan.testing import backend, run_ranks
from longspan.train import DocumentLoss
from tests.model.stock import error, gradients_of

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str) -> Any:
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stock_of(module: Any, device: torch.device) -> Any:
    stock = load_model(preset="qwen3-tiny", vocab_size=module.VOCABULARY, dtype="float64")
    assert isinstance(stock, nn.Module)
    return stock.to(device)


def log_probs_of(stock: Any, document: Document) -> Tensor:
    """Of the tokens of a document's answer, with a graph."""
    positions = np.arange(len(document))
    ids = torch.from_numpy(document[positions]).to(stock.device)
    targets = torch.from_numpy(document.labels(positions)[1:] >= 0)
    log_probs = stock(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[1:, None]).squeeze(1)[targets]


def dpo(module: Any, stock: Any) -> tuple[list[Document], DocumentLoss, Tensor]:
    """Documents, what the example says is their loss, and DPO's formula over a stock model."""
    documents, reference = module.pairs_of(0), -np.arange(2.0 * module.PAIRS)
    sums = torch.stack([log_probs_of(stock, document).sum() for document in documents])
    rewards = 0.1 * (sums - torch.from_numpy(reference).to(sums.device))
    return documents, module.loss_of(reference), -logsigmoid(rewards[::2] - rewards[1::2]).mean()


def grpo(module: Any, stock: Any) -> tuple[list[Document], Any, Tensor]:
    """The same of a clipped ratio, of answers that some other policy drew."""
    random = np.random.default_rng(1)
    sequences = [np.append(x, random.integers(0, module.VOCABULARY, module.ANSWER)) for x in module.prompts_of(0)]
    advantage, old = random.normal(size=len(sequences)), random.normal(-2.8, 0.3, len(sequences))
    documents = module.documents_of(sequences, advantage=advantage, old_log_probs=old)
    losses = []
    for document, a, before in zip(documents, advantage, old, strict=True):
        ratio = (log_probs_of(stock, document) - before).exp()
        losses.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
    return documents, module.loss, torch.cat(losses).mean()


def compare(rank: int, name: str) -> float:
    """The largest error of the loss and of every gradient."""
    module = example(name)
    with World(Layout(2), backend=backend(), timeout=60) as world:
        stock = stock_of(module, world.device)
        documents, loss, wanted = {"dpo": dpo, "grpo": grpo}[name](module, stock)
        wanted.backward()
        model = prepare(stock_of(module, torch.device("cpu")), world)
        result = run_step(model, module.plan_of(documents, world.home), documents, world, loss=loss)
        exact, gradients = gradients_of(stock), gradients_of(model)
    assert exact.keys() == gradients.keys()
    return max(abs(result.loss / wanted.item() - 1), *(error(gradients[n], g) for n, g in exact.items()))


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_step_equals_one_process(name: str) -> None:
    assert max(run_ranks(compare, 2, name)) < 1e-12

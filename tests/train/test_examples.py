"""The loops of examples/ against one process that sees documents one by one: a stock model in float64."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from longspan import Document, Layout, World, run_step
from longspan.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from longspan.testing import backend, run_ranks
from tests.model.stock import error, gradients_of, prepare_untried, tiny, weights_of, worst
from tests.train.own_loss.dense import rows_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- own_loop.py: labels of its own, clipping, saving, resuming


Learnt = tuple[list[float], dict[str, Tensor]]  # losses, and weights at the end


def batch_of(program: Any, step: int) -> tuple[list[Tensor], list[Tensor]]:
    """The program's batch of a step; of step 1 one document of 20 tokens, so that slots have padding rows alone."""
    documents, labels = program.batch_of(step)
    if step != 1:
        return documents, labels
    return [ids[:20] for ids in documents[:1]], [row[:20] for row in labels[:1]]


def learn(rank: int, home: Layout, folder: Path, last: int) -> Learnt:
    program = example("own_loop")
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare_untried(tiny("qwen3", torch.float64, vocabulary=program.VOCABULARY), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        checkpoint = find_checkpoint(folder, world)
        done = load_checkpoint(str(checkpoint), model, optimizer, world)["step"] if checkpoint else 0
        steps = range(done, last)
        losses = [program.train_step(model, optimizer, *batch_of(program, step), world, step) for step in steps]
        save_checkpoint(str(folder), model, optimizer, world, step=last)
        return losses, weights_of(model)


def learn_densely(last: int) -> Learnt:
    program = example("own_loop")
    model = tiny("qwen3", torch.float64, vocabulary=program.VOCABULARY)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    for step in range(last):
        documents, labels = batch_of(program, step)
        logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in documents]
        loss = cross_entropy(torch.cat(logits), torch.cat(labels))
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0  # so that clipping shows
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights_of(model)


def test_the_loop_equals_a_dense_model_and_goes_on_under_another_home(tmp_path: Path) -> None:
    first, _ = run_ranks(learn, 2, Layout(2, tp=2), tmp_path, 1)[0]
    second, weights = run_ranks(learn, 2, Layout(2), tmp_path, 3)[0]
    losses, exact = learn_densely(3)
    assert first + second == pytest.approx(losses, rel=1e-11) and worst(weights, exact) < 1e-11


# ---- dpo.py and grpo.py


def stock_of(module: Any, device: torch.device) -> Any:
    return nn.Module.to(tiny("qwen3", torch.float64, vocabulary=module.VOCABULARY), device)


def dpo(module: Any, stock: Any) -> tuple[list[Document], Any, Tensor]:
    """Documents, what the example says is their loss, and DPO's formula over a stock model."""
    documents, reference = module.pairs_of(0), -np.arange(2.0 * module.PAIRS)
    sums = torch.stack([row.log_probs.sum() for row in rows_of(stock, documents)])
    rewards = 0.1 * (sums - torch.from_numpy(reference).to(sums.device))
    return documents, module.loss_of(reference), -logsigmoid(rewards[::2] - rewards[1::2]).mean()


def grpo(module: Any, stock: Any) -> tuple[list[Document], Any, Tensor]:
    """The same of a clipped ratio, of answers that some other policy drew."""
    random = np.random.default_rng(1)
    sequences = [np.append(x, random.integers(0, module.VOCABULARY, module.ANSWER)) for x in module.prompts_of(0)]
    advantage, old = random.normal(size=len(sequences)), random.normal(-2.8, 0.3, len(sequences))
    documents = module.documents_of(sequences, advantage=advantage, old_log_probs=old)
    losses = []
    for row, a, before in zip(rows_of(stock, documents), advantage, old, strict=True):
        ratio = (row.log_probs - before).exp()
        losses.append(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
    return documents, module.loss, torch.cat(losses).mean()


def compare(rank: int) -> dict[str, float]:
    found = {}
    with World(Layout(2), backend=backend(), timeout=60) as world:
        for name, formula in {"dpo": dpo, "grpo": grpo}.items():
            module = example(name)
            vars(module).update(PAIRS=4, GROUP=2)  # fewer documents
            stock = stock_of(module, world.device)
            documents, loss, wanted = formula(module, stock)
            wanted.backward()
            model = prepare_untried(stock_of(module, torch.device("cpu")), world)
            result = run_step(model, module.plan_of(documents, world.home), documents, world, loss=loss)
            exact, gradients = gradients_of(stock), gradients_of(model)
            assert exact.keys() == gradients.keys()
            errors = [error(gradients[n], g) for n, g in exact.items()]
            found[name] = max(abs(result.loss / wanted.item() - 1), *errors)
    return found


def test_a_step_equals_one_process() -> None:
    for found in run_ranks(compare, 2):
        assert max(found.values()) < 1e-12, found


# ---- own_rows.py


def learn_by_example(rank: int) -> list[float]:
    return example("own_rows").main(rank)


def test_ranks_with_rows_of_their_own_learn_the_same_as_one() -> None:
    alone, two = (run_ranks(learn_by_example, ranks)[0] for ranks in (1, 2))
    assert len(alone) == 4 and two == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0] - 1

"""The loop of examples/own_loop.py against one dense float64 model: labels of its own, clipping, saving, resuming."""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan import Layout, World, plan_dynamic, plan_fixed, prepare, run_step
from longspan.errors import ModelError, NonFiniteError
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, clip_grad_norm, find_checkpoint, load_checkpoint, save_checkpoint
from tests.model.deep import deep
from tests.model.stock import prepare_untried, texts, tiny, weights_of, worst

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"
LENGTHS = (13, 1, 30, 7, 2, 18)


def example() -> Any:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Learnt(NamedTuple):
    """The losses of some steps, and the weights after them."""

    losses: list[float]
    weights: dict[str, Tensor]


def batch_of(program: Any, step: int) -> tuple[list[Tensor], list[Tensor]]:
    """The program's batch of a step; of step 1 one document of 20 tokens, so that slots have padding rows alone."""
    documents, labels = program.batch_of(step)
    if step != 1:
        return documents, labels
    return [ids[:20] for ids in documents[:1]], [row[:20] for row in labels[:1]]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def learn(rank: int, home: Layout, folder: Path, last: int) -> Learnt:
    """Go on from the newest checkpoint of the folder, if there is one, up to step `last`, and save."""
    program = example()
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare_untried(tiny("qwen3", torch.float64, vocabulary=program.VOCABULARY), world)
        optimizer = make_optimizer(model)
        checkpoint = find_checkpoint(folder, world)
        done = load_checkpoint(str(checkpoint), model, optimizer, world)["step"] if checkpoint else 0
        steps = range(done, last)
        losses = [program.train_step(model, optimizer, *batch_of(program, step), world, step) for step in steps]
        save_checkpoint(str(folder), model, optimizer, world, step=last)
        return Learnt(losses, weights_of(model))


def learn_densely(last: int) -> Learnt:
    """The same steps by a stock model that sees documents one by one, with torch's own clipping."""
    program = example()
    model = tiny("qwen3", torch.float64, vocabulary=program.VOCABULARY)
    optimizer, losses = make_optimizer(model), []
    for step in range(last):
        documents, labels = batch_of(program, step)
        targets = sum(int((row != -100).sum()) for row in labels)
        sums = [
            F.cross_entropy(model(input_ids=ids[None], use_cache=False).logits[0], row, reduction="sum")
            for ids, row in zip(documents, labels, strict=True)
        ]
        loss = torch.stack(sums).sum() / targets
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0  # so that clipping shows
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Learnt(losses, weights_of(model))


def test_the_loop_equals_a_dense_model_and_goes_on_under_another_home(tmp_path: Path) -> None:
    """Saved under tensor parallelism and copies of the shards, loaded by another number of ranks."""
    first = run_ranks(learn, 4, Layout(ranks=4, tp=2), tmp_path, 1)[0]
    second = run_ranks(learn, 4, Layout(ranks=4, dp_replicate=2), tmp_path, 2)[0]
    third = run_ranks(learn, 3, Layout(ranks=3), tmp_path, 3)[0]
    dense = learn_densely(3)
    assert first.losses + second.losses + third.losses == pytest.approx(dense.losses, rel=1e-11)
    assert worst(third.weights, dense.weights) < 1e-11


# ---- clipping under homes with stages and experts


def clip_rank(rank: int, home: Layout, family: str) -> tuple[float, float, bool]:
    """The norms of `run_step` with its own clipping and of `clip_grad_norm`, and whether weights come out the same."""
    documents = texts(LENGTHS)
    with World(home, backend=backend(), timeout=60) as world:
        plan = plan_dynamic(LENGTHS, home, max_tokens_per_slot=16, micro_batch_multiple=home.pp)
        norms, weights = [], []
        for own in (False, True):
            model = prepare_untried(deep(family, torch.float64), world)
            optimizer = build_optimizer(model, "sgd", lr=0.5)
            if own:
                run_step(model, plan, documents, world)
                norms.append(clip_grad_norm(model, 0.1, world))
                optimizer.step()
            else:
                norms.append(run_step(model, plan, documents, world, optimizer, max_grad_norm=0.1).grad_norm)
            weights.append(weights_of(model))
        return norms[0], norms[1], all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("home", "family"),
    [
        (Layout(ranks=4, pp=2), "qwen3"),
        pytest.param(Layout(ranks=4, ep=2), "qwen3-moe", marks=pytest.mark.whole),
    ],
)
def test_own_clipping_is_that_of_a_step(home: Layout, family: str) -> None:
    answers = run_ranks(clip_rank, 4, home, family)
    assert len({norm.hex() for pair in answers for norm in pair[:2]}) == 1 and answers[0][0] > 0.1
    assert all(same for _, _, same in answers)


def refuse_rank(rank: int) -> str:
    documents = texts(LENGTHS)
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        model = prepare(tiny("qwen3"), world, probe=False)
        with pytest.raises(ModelError, match="max_norm is 0; give a positive norm"):
            clip_grad_norm(model, 0, world)
        run_step(model, plan_fixed(LENGTHS, world.home, cp=2), documents, world)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert clip_grad_norm(model, float("inf"), world) > 0
        assert all(map(torch.equal, before, (p.grad for p in model.parameters() if p.grad is not None)))
        last = list(model.parameters())[-1]
        if rank == 1 and last.grad is not None:
            last.grad.mul_(float("nan"))
        before = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        with pytest.raises(NonFiniteError) as error:
            clip_grad_norm(model, 0.1, world)
        after = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
        return str(error.value)


def test_what_cannot_clip_is_refused_on_every_rank() -> None:
    said = set(run_ranks(refuse_rank, 2))
    assert len(said) == 1
    assert (
        "the gradient norm is nan; weights and optimizer are as before the step. Weights are finite, and" in said.pop()
    )

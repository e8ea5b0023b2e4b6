"""Preferences: DPO over documents of any length, under any plan. docs/losses.md explains it.

The preferred answer counts upwards from the last token of its prompt, the other one is drawn at random. `python
examples/dpo.py --world 2` starts two local CPU processes, `torchrun --nproc_per_node=4 examples/dpo.py` runs on four
GPUs. A test compares one step with a stock model in float64 (tests/train/test_examples.py).
"""

import argparse
import copy
import os

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longspan import (
    Document,
    DocumentLoss,
    Layout,
    Plan,
    World,
    load_model,
    plan_dynamic,
    prepare,
    run_step,
    token_log_probs,
)
from longspan.testing import run_ranks

VOCABULARY, PAIRS, BETA = 32, 8, 0.1


def pairs_of(step: int) -> list[Document]:
    """Documents 2 i and 2 i + 1 are the preferred and the other answer to prompt i; answers alone are targets."""
    random, documents = np.random.default_rng(step), []
    for _ in range(PAIRS):
        prompt = random.integers(0, VOCABULARY, random.integers(4, 120))
        answer = random.integers(3, 12)
        upwards = (prompt[-1] + 1 + np.arange(answer)) % VOCABULARY
        for tokens in (upwards, random.integers(0, VOCABULARY, answer)):
            ids = np.concatenate([prompt, tokens])
            documents.append(Document(ids, loss_mask=np.arange(len(ids)) >= len(prompt)))
    return documents


def margins(sums: Tensor, reference: Tensor) -> Tensor:
    """The reward of each preferred answer over that of the other one; both arguments (2 n,)."""
    rewards = BETA * (sums - reference)
    return rewards[::2] - rewards[1::2]


def loss_of(reference: np.ndarray) -> DocumentLoss:
    """DPO's loss of each pair, given the reference model's log-probability of each document."""

    def loss(sums: Tensor, pair: tuple[int, ...]) -> Tensor:
        return -logsigmoid(margins(sums, torch.from_numpy(reference[list(pair)])))

    return DocumentLoss(loss, sets=[(2 * i, 2 * i + 1) for i in range(PAIRS)])


def plan_of(documents: list[Document], home: Layout) -> Plan:
    targets = sum(document.targets for document in documents)
    return plan_dynamic([len(document) for document in documents], home, max_tokens_per_slot=512, targets=targets)


def main(rank: int, steps: int) -> None:
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        stock = load_model(preset="qwen3-tiny", vocab_size=VOCABULARY)
        reference, model = prepare(copy.deepcopy(stock), world), prepare(stock, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

        def report(when: str) -> None:
            documents = pairs_of(10**6)  # held out
            plan = plan_of(documents, world.home)
            sums = [token_log_probs(x, plan, documents, world).sums for x in (model, reference)]
            over = margins(*map(torch.from_numpy, sums))
            if rank == 0:
                won = (over > 0).double().mean()
                print(f"{when}: reward margin {over.mean():+.3f}, preferred in {won:.0%} of pairs", flush=True)

        report("before")
        for step in range(steps):
            documents = pairs_of(step)
            plan = plan_of(documents, world.home)
            loss = loss_of(token_log_probs(reference, plan, documents, world).sums)
            result = run_step(model, plan, documents, world, optimizer, max_grad_norm=1.0, step=step, loss=loss)
            if rank == 0 and step % 5 == 0:
                twice = f"{result.forward_twice} of {result.micro_batches} micro-batches twice"
                print(f"step {step}: loss {result.loss:.4f}, {twice}", flush=True)
        report("after")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2, help="local processes, where torchrun started none")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), options.steps)
    else:
        run_ranks(main, options.world, options.steps, timeout=600)

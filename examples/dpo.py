"""Preferences: DPO over documents of any length, under any plan. docs/losses.md explains it.

The preferred answer counts upwards from the last token of its prompt, the other one is drawn at random. `python
examples/dpo.py --world 2` starts two local CPU processes, `torchrun --nproc_per_node=4 examples/dpo.py` runs on four
GPUs; `--check` compares one step with a stock model in one process, in float64.
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


def check(rank: int) -> None:
    """One step in float64: loss and every gradient beside those of a stock model that sees documents one by one."""
    documents, reference = pairs_of(0), -np.arange(2.0 * PAIRS)
    stock = load_model(preset="qwen3-tiny", vocab_size=VOCABULARY, dtype="float64")
    sums = []
    for document in documents:
        ids, answer = torch.from_numpy(document[:]), document.labels(np.arange(len(document)))[1:] >= 0
        log_probs = stock(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        sums.append(log_probs.gather(1, ids[1:, None]).squeeze(1)[torch.from_numpy(answer)].sum())
    wanted = -logsigmoid(margins(torch.stack(sums), torch.from_numpy(reference))).mean()
    wanted.backward()
    exact = {name: parameter.grad for name, parameter in stock.named_parameters()}
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        model = prepare(load_model(preset="qwen3-tiny", vocab_size=VOCABULARY, dtype="float64"), world)
        result = run_step(model, plan_of(documents, world.home), documents, world, loss=loss_of(reference))
        gradients = {name: parameter.grad.full_tensor().cpu() for name, parameter in model.named_parameters()}
    errors = [((gradients[name] - g).norm() / g.norm()).item() for name, g in exact.items()]
    worst = max(*errors, abs(result.loss / wanted.item() - 1))
    if rank == 0:
        print(f"largest relative error of the loss and of {len(exact)} gradients: {worst:.1e}")
    assert worst < 1e-12


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2, help="local processes, where torchrun started none")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="compare a step with one process in float64")
    options = parser.parse_args()
    program, arguments = (check, ()) if options.check else (main, (options.steps,))
    if "RANK" in os.environ:
        program(int(os.environ["RANK"]), *arguments)
    else:
        run_ranks(program, options.world, *arguments, timeout=600)

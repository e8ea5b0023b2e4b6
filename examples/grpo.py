"""Rewards: GRPO over sampled answers, under any plan. docs/losses.md explains it.

An answer of four tokens is rewarded for each of them that repeats the last token of its prompt. `python
examples/grpo.py --world 2` starts two local CPU processes, `torchrun --nproc_per_node=4 examples/grpo.py` runs on four
GPUs; `--check` compares one step with a stock model in one process, in float64.
"""

import argparse
import os

import numpy as np
import torch
from torch import Tensor, nn

from longspan import (
    Document,
    Layout,
    Plan,
    World,
    bind,
    load_model,
    plan_dynamic,
    plan_fixed,
    prepare,
    run_step,
    token_log_probs,
)
from longspan.testing import run_ranks
from longspan.train import LossRows

VOCABULARY, PROMPTS, GROUP, ANSWER, CLIP = 16, 8, 8, 4, 0.2


def prompts_of(step: int) -> list[np.ndarray]:
    """Prompts of a step, each GROUP times."""
    random = np.random.default_rng(step)
    prompts = [random.integers(0, VOCABULARY, random.integers(2, 40)) for _ in range(PROMPTS)]
    return [prompt for prompt in prompts for _ in range(GROUP)]


@torch.no_grad()
def sample(model: nn.Module, prompts: list[np.ndarray], world: World, seed: int) -> list[np.ndarray]:
    """Prompts with their answers, the same on every rank: a forward pass for each token, without a cache."""
    model.eval()
    sequences, generator = list(prompts), torch.Generator().manual_seed(seed)
    for _ in range(ANSWER):
        lengths = [len(ids) for ids in sequences]
        micro_batch = plan_fixed(lengths, world.home, cp=1).micro_batches[0]
        shard, order = bind(micro_batch, world).with_padding(), list(micro_batch.documents)
        ids = shard.scatter(torch.from_numpy(np.concatenate([sequences[d] for d in order]))).to(world.device)
        logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits[0]
        last = np.cumsum([lengths[d] for d in order]) - 1  # packed rows
        chances = shard.gather(logits)[torch.from_numpy(last)].cpu().double().softmax(-1)
        for d, token in zip(order, torch.multinomial(chances, 1, generator=generator).flatten().tolist(), strict=True):
            sequences[d] = np.append(sequences[d], token)
    return sequences


def rewards_of(sequences: list[np.ndarray]) -> np.ndarray:
    """The share of an answer's tokens that repeat the last token of its prompt."""
    return np.array([(ids[-ANSWER:] == ids[-ANSWER - 1]).mean() for ids in sequences])


def documents_of(sequences: list[np.ndarray], **values: np.ndarray) -> list[Document]:
    """Answers alone are targets; values are given of each document."""
    masks = [np.arange(len(ids)) >= len(ids) - ANSWER for ids in sequences]
    return [
        Document(ids, loss_mask=mask, **{name: value[d] for name, value in values.items()})
        for d, (ids, mask) in enumerate(zip(sequences, masks, strict=True))
    ]


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """How much better each answer is than those to the same prompt."""
    groups = rewards.reshape(-1, GROUP)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)).ravel()


def loss(log_probs: Tensor, at: LossRows) -> Tensor:
    """The clipped ratio of each token."""
    ratio, advantage = (log_probs - at["old_log_probs"]).exp(), at["advantage"]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def plan_of(documents: list[Document], home: Layout) -> Plan:
    targets = sum(document.targets for document in documents)
    return plan_dynamic([len(document) for document in documents], home, max_tokens_per_slot=1024, targets=targets)


def main(rank: int, steps: int) -> None:
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        model = prepare(load_model(preset="qwen3-tiny", vocab_size=VOCABULARY), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rewards = list[float]()
        for step in range(steps):
            world.step = step
            sequences = sample(model, prompts_of(step), world, seed=step)
            reward = rewards_of(sequences)
            rewards.append(reward.mean())
            plain = documents_of(sequences)
            plan = plan_of(plain, world.home)
            old = token_log_probs(model, plan, plain, world)
            documents = documents_of(
                sequences, advantage=advantages_of(reward), old_log_probs=[old.of(d) for d in range(len(plain))]
            )
            for _ in range(2):  # in the second, ratios are no longer 1
                run_step(model, plan, documents, world, optimizer, max_grad_norm=1.0, step=step, loss=loss)
            if rank == 0 and step % 10 == 0:
                print(f"step {step}: mean reward {rewards[-1]:.3f}", flush=True)
        if rank == 0:
            print(f"mean reward before {np.mean(rewards[:3]):.3f}, after {np.mean(rewards[-3:]):.3f}", flush=True)


def check(rank: int) -> None:
    """One step in float64: loss and every gradient beside those of a stock model that sees documents one by one."""
    random = np.random.default_rng(1)
    sequences = [np.append(prompt, random.integers(0, VOCABULARY, ANSWER)) for prompt in prompts_of(0)]
    values = {
        "advantage": random.normal(size=len(sequences)),
        "old_log_probs": random.normal(-2.8, 0.3, len(sequences)),
    }
    stock = load_model(preset="qwen3-tiny", vocab_size=VOCABULARY, dtype="float64")
    wanted = torch.zeros((), dtype=torch.float64)
    for ids, advantage, old in zip(map(torch.from_numpy, sequences), *values.values(), strict=True):
        log_probs = stock(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        ratio = (log_probs.gather(1, ids[1:, None]).squeeze(1)[-ANSWER:] - old).exp()
        wanted = wanted - torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()
    wanted = wanted / (len(sequences) * ANSWER)
    wanted.backward()
    exact = {name: parameter.grad for name, parameter in stock.named_parameters()}
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        model = prepare(load_model(preset="qwen3-tiny", vocab_size=VOCABULARY, dtype="float64"), world)
        documents = documents_of(sequences, **values)
        result = run_step(model, plan_of(documents, world.home), documents, world, loss=loss)
        gradients = {name: parameter.grad.full_tensor().cpu() for name, parameter in model.named_parameters()}
    errors = [((gradients[name] - g).norm() / g.norm()).item() for name, g in exact.items()]
    worst = max(*errors, abs(result.loss / wanted.item() - 1))
    if rank == 0:
        print(f"largest relative error of the loss and of {len(exact)} gradients: {worst:.1e}")
    assert worst < 1e-12


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2, help="local processes, where torchrun started none")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--check", action="store_true", help="compare a step with one process in float64")
    options = parser.parse_args()
    program, arguments = (check, ()) if options.check else (main, (options.steps,))
    if "RANK" in os.environ:
        program(int(os.environ["RANK"]), *arguments)
    else:
        run_ranks(program, options.world, *arguments, timeout=600)

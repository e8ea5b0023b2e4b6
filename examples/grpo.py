"""Rewards: GRPO over sampled answers, under any plan. docs/losses.md explains it.

An answer of four tokens is rewarded for each of them that repeats the last token of its prompt. `python
examples/grpo.py --world 2` starts two local CPU processes, `torchrun --nproc_per_node=4 examples/grpo.py` runs on four
GPUs. A test compares one step with a stock model in float64 (tests/train/test_examples.py).
"""

import argparse
import os

import numpy as np
import torch
from torch import Tensor, nn

from longspan import Document, Layout, Plan, World, bind, load_model, plan_dynamic, plan_fixed, prepare, run_step
from longspan.testing import run_ranks
from longspan.train import LossTokens, token_log_probs

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


def documents_of(sequences: list[np.ndarray], **values: np.ndarray) -> list[Document]:
    """Answers alone are targets; values are given of each document."""
    masks = [np.arange(len(ids)) >= len(ids) - ANSWER for ids in sequences]
    of_each = [{name: value[d] for name, value in values.items()} for d in range(len(sequences))]
    return [Document(ids, loss_mask=mask, **of) for ids, mask, of in zip(sequences, masks, of_each, strict=True)]


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """How much better each answer is than those to the same prompt."""
    groups = rewards.reshape(-1, GROUP)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)).ravel()


def loss(log_probs: Tensor, at: LossTokens) -> Tensor:
    """The clipped ratio of each token."""
    ratio, advantage = (log_probs - at["old_log_probs"]).exp(), at["advantage"]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def plan_of(documents: list[Document], home: Layout) -> Plan:
    lengths, targets = [len(document) for document in documents], len(documents) * ANSWER
    return plan_dynamic(lengths, home, max_tokens_per_slot=1024, targets=targets)


def main(rank: int, steps: int) -> None:
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        model = prepare(load_model(preset="qwen3-tiny", vocab_size=VOCABULARY), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rewards = list[float]()
        for step in range(steps):
            world.step = step
            sequences = sample(model, prompts_of(step), world, seed=step)
            reward = np.array([(ids[-ANSWER:] == ids[-ANSWER - 1]).mean() for ids in sequences])
            rewards.append(reward.mean())
            plain = documents_of(sequences)
            plan = plan_of(plain, world.home)
            before = token_log_probs(model, plan, plain, world)
            old = [before.of(d) for d in range(len(plain))]
            documents = documents_of(sequences, advantage=advantages_of(reward), old_log_probs=old)
            for _ in range(2):  # in the second, ratios are no longer 1
                run_step(model, plan, documents, world, optimizer, max_grad_norm=1.0, step=step, loss=loss)
            if rank == 0 and step % 10 == 0:
                print(f"step {step}: mean reward {rewards[-1]:.3f}", flush=True)
        if rank == 0:
            print(f"mean reward before {np.mean(rewards[:3]):.3f}, after {np.mean(rewards[-3:]):.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2, help="local processes, where torchrun started none")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), options.steps)
    else:
        run_ranks(main, options.world, options.steps, timeout=600)

"""Your own training loop: your labels, your loss, your optimizer. docs/own-loop.md explains every line.

`python examples/own_loop.py` starts four local CPU processes, then two that go on from their checkpoint;
`torchrun --nproc_per_node=4 examples/own_loop.py FOLDER` runs on four GPUs, with checkpoints in FOLDER.
"""

import os
import sys
import tempfile

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan import Layout, PlannerConfig, World, bind, evaluate, load_model, plan_dynamic, prepare
from longspan.testing import run_ranks
from longspan.train import clip_grad_norm, find_checkpoint, load_checkpoint, save_checkpoint, summed_cross_entropy

VOCABULARY, PROMPT = 64, 5


def batch_of(step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Documents and labels of a step: the same on every rank. The prompt of a document is no target."""
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(8, 300, (6,), generator=random).tolist()
    documents = [(torch.arange(n) + step) % VOCABULARY for n in lengths]
    labels = [F.pad(ids[1:], (0, 1), value=-100) for ids in documents]  # shifted here, inside the document
    for row in labels:
        row[: PROMPT - 1] = -100
    return documents, labels


def train_step(model, optimizer, documents: list[Tensor], labels: list[Tensor], world: World, step: int) -> float:
    """One update; returns its loss, the mean over all targets of all ranks."""
    world.step, total = step, 0.0
    targets = sum(int((row != -100).sum()) for row in labels)
    plan = plan_dynamic([len(ids) for ids in documents], world.home, max_tokens_per_slot=256, targets=targets)
    world.prepare(plan)
    for micro_batch in plan.micro_batches:
        shard = bind(micro_batch, world).with_padding()
        ids = shard.scatter(torch.cat([documents[d] for d in micro_batch.documents])).to(world.device)
        local_labels = shard.scatter(torch.cat([labels[d] for d in micro_batch.documents]), fill=-100).to(world.device)
        logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits[0]
        loss = summed_cross_entropy(logits, local_labels) / plan.targets
        loss.backward()
        total += loss.item()
    clip_grad_norm(model, 1.0, world)
    optimizer.step()
    optimizer.zero_grad()
    return world.control.sum_over_slots([total])[0]


def main(rank: int, folder: str, steps: int) -> None:
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        model = prepare(load_model(preset="qwen3-tiny", vocab_size=VOCABULARY), world).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        checkpoint = find_checkpoint(folder, world)
        done = load_checkpoint(checkpoint, model, optimizer, world)["step"] if checkpoint else 0
        for step in range(done, steps):
            loss = train_step(model, optimizer, *batch_of(step), world, step)
            if rank == 0:
                print(f"{world.home.slots} slots, step {step}: loss {loss:.4f}", flush=True)
        save_checkpoint(folder, model, optimizer, world, step=steps, keep=2)
        documents, _ = batch_of(1000)
        for cp in (1, world.home.slots):  # the same weights at another degree: only the plan differs
            result = evaluate(model, documents, PlannerConfig.fixed(cp), world)
            if rank == 0:
                print(f"evaluation at degree {cp}: {result.loss:.6f}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), sys.argv[1], steps=8)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(main, 4, folder, 4)
            run_ranks(main, 2, folder, 8)

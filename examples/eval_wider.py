"""Train at context-parallel degree 2 and evaluate at 1, 2 and 4, with the same ranks and the same weights.

`python examples/eval_wider.py` starts four local CPU processes;
`torchrun --nproc_per_node=4 examples/eval_wider.py` runs the same on four GPUs.
"""

import os

import numpy as np
import torch

from longspan import Layout, PlannerConfig, World, evaluate, load_model, plan_fixed, prepare, run_step
from longspan.testing import run_ranks

VOCABULARY = 64


def documents(seed: int, count: int) -> list[np.ndarray]:
    """Documents of very different lengths, whose token ids count up from a random start."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(4, 1, count).astype(int), 2, 500)
    return [(random.integers(VOCABULARY) + np.arange(n)) % VOCABULARY for n in lengths]


def main(rank: int) -> None:
    home = Layout(ranks=4)
    training, held_out = documents(seed=0, count=24), documents(seed=1, count=10)
    narrow = plan_fixed([len(d) for d in training], home, cp=2, max_tokens_per_slot=512)

    with World(home) as world:
        model = prepare(load_model(preset="qwen3-tiny", vocab_size=VOCABULARY, seed=0), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(20):
            result = run_step(model, narrow, training, world, optimizer=optimizer)
            if rank == 0 and step % 5 == 0:
                print(f"step {step:2d}  cp 2  training loss {result.loss:.4f}")
        for cp in (1, 2, 4):
            result = evaluate(model, held_out, PlannerConfig.fixed(cp), world)
            if rank == 0:
                accuracy = result.metrics["token_accuracy"].value
                print(f"evaluation at cp {cp}: loss {result.loss:.7f}, token accuracy {accuracy:.4f}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]))
    else:
        run_ranks(main, 4)

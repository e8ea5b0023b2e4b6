"""Your own loop with a teacher: a student learns whole distributions of a second model, under one plan.

`python examples/distill.py` starts two local CPU processes with tiny random models; put your own folders into
`load_model`, and start `torchrun --nproc_per_node=8 examples/distill.py` on GPUs. docs/distillation.md has the command.
"""

import os

import torch

from longspan import Document, Layout, World, load_model, plan_dynamic, prepare, run_step
from longspan.testing import run_ranks
from longspan.train import Distillation, build_optimizer

VOCABULARY, PROMPT = 64, 5


def documents_of(step: int) -> list[Document]:
    """The documents of a step, the same on every rank; their first tokens are a prompt, which is no target."""
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(PROMPT + 1, 300, (6,), generator=random).tolist()
    texts = [(torch.arange(n) * 7 + step) % VOCABULARY for n in lengths]
    return [Document(ids.numpy(), loss_mask=[i >= PROMPT for i in range(len(ids))]) for ids in texts]


def main(rank: int, steps: int = 8) -> None:
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        student = prepare(load_model(preset="qwen3-tiny", vocab_size=VOCABULARY), world)
        frozen = load_model(preset="llama-tiny", vocab_size=VOCABULARY, seed=1).requires_grad_(False)
        teacher = prepare(frozen, world)  # frozen="nf4": in 4 bits; offload_weights=True: on the host
        optimizer = build_optimizer(student, lr=3e-3)
        loss = Distillation(teacher, beta=0.5, cross_entropy_weight=0.1)
        for step in range(steps):
            documents = documents_of(step)
            targets = sum(document.targets for document in documents)
            plan = plan_dynamic([*map(len, documents)], world.home, max_tokens_per_slot=512, targets=targets)
            result = run_step(student, plan, documents, world, optimizer, loss=loss, max_grad_norm=1.0)
            if rank == 0:
                figures = ", ".join(f"{name} {value:.4f}" for name, value in result.figures.items())
                print(f"step {step}: loss {result.loss:.4f}, {figures}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]))
    else:
        run_ranks(main, 2)

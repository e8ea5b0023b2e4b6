"""A loop whose ranks load their own documents, as from a stream that each of them reads a part of: docs/own-loop.md.

`python examples/own_rows.py` starts two local CPU processes; `torchrun --nproc_per_node=4 examples/own_rows.py` runs on
four GPUs.
"""

import os
from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import IterableDataset

from longspan import Document, Layout, World, gather_documents, load_model, plan_dynamic, prepare, run_step
from longspan.testing import run_ranks

VOCABULARY, PER_STEP = 64, 6


class Rows(IterableDataset):
    """The documents that one rank reads of a source: every n-th, for n ranks. The prompt of each is no target."""

    def __init__(self, first: int, every: int, count: int = 21) -> None:
        self.numbers = range(first, count, every)

    def __iter__(self) -> Iterator[Document]:
        for number in self.numbers:
            length = 8 + 37 * number % 200
            ids = (torch.arange(length) + number) % VOCABULARY
            yield Document(ids, loss_mask=torch.arange(length) >= 5)


def main(rank: int) -> list[float]:
    with World(Layout(ranks=int(os.environ["WORLD_SIZE"]))) as world:
        model = prepare(load_model(preset="qwen3-tiny", vocab_size=VOCABULARY), world).train()
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        ranks = len(world.home.ranks)
        rows = iter(Rows(world.rank, ranks))
        while documents := gather_documents(islice(rows, PER_STEP // ranks), world):
            plan = plan_dynamic(documents.lengths, world.home, max_tokens_per_slot=256, targets=documents.targets)
            result = run_step(model, plan, documents, world, optimizer=optimizer, max_grad_norm=1.0)
            losses.append(result.loss)
            if rank == 0:
                print(f"{len(documents)} documents, {result.targets} targets: loss {result.loss:.4f}", flush=True)
        return losses


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]))
    else:
        run_ranks(main, 2)

"""An encoder and a language model, each in a layout of its own on the same ranks: docs/bridge.md explains it.

An image is a few rows with one bright column, which the token after it names. `python examples/two_modules.py` runs on
4 CPU processes, then 2 from their checkpoint; `torchrun --nproc_per_node=4 examples/two_modules.py FOLDER` on 4 GPUs.
"""

import os
import sys
import tempfile

import numpy as np
import torch

from longspan import Layout, PlannerConfig, World, evaluate, load_model, plan_dynamic, prepare, run_step
from longspan.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from longspan.multimodal import Encoder, MediaDocuments, MediaItem, MultimodalModel, prepare_encoder
from longspan.testing import run_ranks
from longspan.train import build_optimizer

COLUMNS, IMAGE, PLACEHOLDER = 8, 8, 9  # ids below 8 name columns, 8 begins an image, 9 stands for one of its rows


def documents_of(step: int) -> MediaDocuments:
    """The documents of a step, the same on every rank: up to three images in one, or text alone, which counts."""
    random, tokens, items, images = np.random.default_rng(step), [], [], []
    for document in range(16):
        ids = list[int]()
        for _ in range(random.integers(0, 4)):
            rows, column = int(random.integers(2, 7)), int(random.integers(COLUMNS))
            items.append(MediaItem(document, spans=((len(ids) + 1, len(ids) + 1 + rows),)))
            images.append(torch.from_numpy(random.normal(np.arange(COLUMNS) == column, 0.2, (rows, COLUMNS))))
            ids += [IMAGE, *[PLACEHOLDER] * rows, column]
        tokens.append(np.array(ids or range(COLUMNS)))
    return MediaDocuments(tokens, items, images)


class Bars(torch.nn.Module):
    """Rows of pixels to rows of the language model's width: all images of a call at once, end to end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.projector = torch.nn.Linear(COLUMNS, 64), torch.nn.Linear(64, width)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return self.projector(torch.nn.functional.gelu(self.into(torch.cat(images).to(self.into.weight))))


def model_of(world: World, encoder_world: World) -> MultimodalModel:
    """Both modules under their homes; all ranks draw equal weights."""
    torch.manual_seed(0)
    language_model = load_model(preset="qwen3-tiny", vocab_size=16)
    bars = prepare_encoder(Bars(language_model.config.hidden_size), encoder_world)
    return MultimodalModel({"image": Encoder(module=bars, world=encoder_world)}, prepare(language_model, world), world)


def main(rank: int, folder: str, steps: int) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    with World(Layout(ranks, tp=2)) as world, World(Layout(ranks)) as encoder_world:
        model = model_of(world, encoder_world)
        optimizer = build_optimizer(model, lr={"encoders": 5e-3, "language_model": 2e-3})
        done = load_checkpoint(path, model, optimizer, world)["step"] if (path := find_checkpoint(folder, world)) else 0
        for step in range(done, steps):
            docs = documents_of(step)
            plan = plan_dynamic(docs.lengths, world.home, targets=docs.targets, max_tokens_per_slot=128)
            result = run_step(model, plan, docs, world, optimizer=optimizer, max_grad_norm=1.0, step=step)
            if rank == 0:
                print(f"{ranks} ranks, step {step}: loss {result.loss:.4f}", flush=True)
        save_checkpoint(folder, model, optimizer, world, step=steps)
        for cp in sorted({1, world.home.slots}):  # the same weights at another degree: only the plan differs
            loss = evaluate(model, documents_of(10**6), PlannerConfig.fixed(cp), world).loss
            print(f"evaluation at degree {cp}: {loss:.6f}\n" if rank == 0 else "", end="", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), sys.argv[1], steps=60)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(main, 4, folder, 30)
            run_ranks(main, 2, folder, 40)

"""A LoRA adapter of one's own in a loop of one's own: peft makes it, any plan trains it, stock peft loads it again.

`python examples/lora.py` runs it in two processes on a CPU.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

from longspan import Layout, World, load_model, plan_dynamic, prepare, run_step, save_model
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, disable_adapter

LENGTHS = (300, 40, 90, 7)
DOCUMENTS = [(np.arange(n) * 7 + n) % 64 for n in LENGTHS]


def train(rank: int, base: Path, adapter: Path) -> tuple[float, float, float]:
    """The loss before and after some steps, and that of the base model after them."""
    with World(Layout(ranks=2), backend=backend()) as world:
        torch.manual_seed(0)  # peft draws the adapter, which must be the same on every rank
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = prepare(peft.get_peft_model(load_model(base), config), world)
        optimizer = build_optimizer(model, lr=0.02)  # knows the adapter alone
        plan = plan_dynamic(LENGTHS, world.home, max_tokens_per_slot=256)
        losses = [run_step(model, plan, DOCUMENTS, world, optimizer=optimizer).loss for _ in range(8)]
        with disable_adapter(model):  # reference log-probabilities are had the same way
            reference = run_step(model, plan, DOCUMENTS, world, backward=False).loss
        save_model(model, adapter, world)
        return losses[0], losses[-1], reference


def main(folder: Path) -> None:
    """Make a base model, train an adapter on it, and load both in stock transformers and peft."""
    base, adapter = folder / "base", folder / "adapter"
    load_model(preset="qwen3-tiny", vocab_size=64).save_pretrained(base)
    first, last, reference = run_ranks(train, 2, base, adapter)[0]
    stock: Any = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    print(f"loss {first:.4f}, after 8 steps {last:.4f}, without the adapter {reference:.4f}")
    print(f"stock peft loads it: {stock.peft_config['default'].r} ranks in {adapter.name}/")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lora"))

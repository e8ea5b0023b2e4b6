"""GRPO with TRL over sampled answers: the line that makes the trainer is all that differs from a script of TRL.

`torchrun --nproc-per-node 2 examples/grpo_trl.py --cp 2` trains a tiny model to answer in vowels.
Answers come from a copy of the model on the first process, which gets whole weights by name before each batch, as an
inference engine does; use_vllm=True needs no such class. A test swaps the line and runs the stock script in one process
(tests/hf/test_examples.py). docs/trainer.md explains it.
"""

import argparse
from collections.abc import Iterable
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from longspan import load_model
from longspan.corpus import train_tokenizer
from longspan.hf import LongspanArguments, with_longspan

ANSWER, LETTERS = 8, list("abcdefgh")


class EngineGRPO(GRPOTrainer):
    """GRPO whose answers come from an engine of one's own; only the first process calls it."""

    engine: Any = None

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Whole weights by name: longspan gathers them, where stock TRL has them."""
        of_shards = getattr(self, "weights_by_name", None)
        return of_shards() if of_shards else self.model.state_dict().items()

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        if self.engine is None:
            self.engine = AutoModelForCausalLM.from_pretrained(self.model.config.name_or_path).eval()
        own = self.engine.state_dict()
        for name, weight in self.weights():
            own[name].copy_(weight)
        longest = max(map(len, prompt_ids))
        padding = self.processing_class.pad_token_id
        padded = torch.tensor([[padding] * (longest - len(ids)) + ids for ids in prompt_ids])
        real = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids])
        options = {"max_new_tokens": ANSWER, "do_sample": True, "pad_token_id": padding, "eos_token_id": None}
        answers = self.engine.generate(input_ids=padded, attention_mask=real, **options)
        return answers[:, longest:].tolist(), None


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The share of an answer that is vowels."""
    return [sum(text.lower().count(letter) for letter in "aeiou") / ANSWER for text in completions]


def make_prompts(count: int) -> Dataset:
    """Prompts of 2 to 40 letters."""
    draw = np.random.default_rng(0)
    return Dataset.from_list([{"prompt": "".join(draw.choice(LETTERS, draw.integers(2, 40)))} for _ in range(count)])


def make_model() -> str:
    """A folder with a tiny model and a tokenizer, as `from_pretrained` reads it; the same on every process."""
    folder = mkdtemp()
    torch.manual_seed(0)
    load_model(preset="qwen3-tiny", vocab_size=257).save_pretrained(folder)
    train_tokenizer(LETTERS, 257).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a folder of transformers; empty: a tiny model, made here")
    parser.add_argument("--cp", type=int, default=1, help="processes that share a document")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="runs/grpo_trl")
    options = parser.parse_args()
    folder, layout = options.model or make_model(), LongspanArguments(context_parallel_size=options.cp)
    args = GRPOConfig(
        output_dir=options.output,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=ANSWER,
        max_steps=options.steps,
        learning_rate=1e-6 if options.model else 1e-3,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=4,
        save_strategy="no",
        report_to=[],
    )
    trainer = with_longspan(EngineGRPO)(folder, vowels, args, make_prompts(512), longspan=layout)
    trainer.train()
    trainer.end()


if __name__ == "__main__":
    main()

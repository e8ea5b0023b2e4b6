"""One update of TRL's GRPO over answers of very different lengths, by plans of one degree and by dynamic ones.

torchrun --nproc-per-node 2 bench/training/grpo_update.py --preset qwen3-8b --layers 6 --planners dynamic \
    --out bench/records/grpo-update-2xH200.json                       # 64 answers of 1K to 32K tokens
python bench/training/grpo_update.py --world 2 --answers 8 --shortest 32 --longest 512      # two CPU processes

Answers are random ids whose lengths are drawn evenly by their logarithm, the same ones in every update, and rewards
are random; no engine makes them. The seconds are those of an update: from the trainer's loss, which takes one forward
pass, to the end of the optimizer's step; not those of answers and rewards, which are beside them. `cp 2` is a fixed
plan of that degree. Parameters are float32, and on GPUs all compute in bfloat16; memory is auto on GPUs.
On GPUs run one planner a command: each adds its row to the record.
"""

import argparse
import os
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.training.trainer_steps import (
    VOCABULARY,
    add_rows,
    make_config,
    make_tokenizer,
    now,
    peak_gib,
    start_peak,
    write_rows,
)
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from longspan.hf import LongspanArguments, with_longspan
from longspan.model import load_model
from longspan.testing import run_ranks

PROMPT, GROUP = 16, 8  # tokens of a prompt, and answers to it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-tiny")
    parser.add_argument("--layers", type=int, default=0, help="of the preset; 0: all")
    parser.add_argument("--answers", type=int, default=64, help="of an update, a multiple of 8")
    parser.add_argument("--shortest", type=int, default=1024, help="tokens of the shortest answer")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest answer")
    parser.add_argument("--planners", nargs="+", default=("dynamic", "2", "1"), help="dynamic, or a fixed degree")
    parser.add_argument("--rows", default="auto", help="of a slot and micro-batch")
    parser.add_argument("--updates", type=int, default=2, help="that are timed, after one that is not")
    parser.add_argument("--seed", type=int, default=0, help="of lengths")
    parser.add_argument("--world", type=int, default=1, help="local CPU processes, without torchrun")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rows = [measure_planner(int(os.environ["RANK"]), name, options) for name in options.planners]
    else:
        rows = [run_ranks(measure_planner, options.world, name, options, timeout=3600)[0] for name in options.planners]
    if int(os.environ.get("RANK", "0")):
        return
    record = add_rows("GRPO update", options, rows, Path(__file__).parent)
    lengths = answer_lengths(options)
    about = (
        f"{options.preset}, {options.layers or 'all'} layers, an update of {len(lengths)} answers of {min(lengths):,} "
        f"to {max(lengths):,} tokens, {sum(lengths) + PROMPT * len(lengths):,} in all with their prompts"
    )
    write_rows(record, options.out, "An update of GRPO by planner", about)


def answer_lengths(options: argparse.Namespace) -> list[int]:
    """Tokens of each answer: the shortest, the longest, and others drawn evenly by their logarithm."""
    draw, ends = np.random.default_rng(options.seed), np.log([options.shortest, options.longest])
    lengths = [options.shortest, options.longest, *np.exp(draw.uniform(*ends, options.answers - 2)).astype(int)]
    return draw.permutation(lengths).tolist()


def measure_planner(rank: int, planner: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a planner on this rank."""
    gpu, ranks = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    start_peak()
    chosen: dict[str, Any] = {"planner": planner} if planner == "dynamic" else {"context_parallel_size": int(planner)}
    layout = LongspanArguments(**chosen, max_tokens_per_slot=options.rows)
    prompts = [" ".join(f"word{(i + j) % 1000}" for j in range(PROMPT)) for i in range(options.answers // GROUP)]
    clock = UpdateClock()
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.answers // ranks,
            num_generations=GROUP,
            max_completion_length=options.longest,
            max_steps=1 + options.updates,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            logging_steps=10_000,
            save_strategy="no",
            report_to=[],
            use_cpu=not gpu,
            bf16=gpu,
            disable_tqdm=True,
        )
        trainer = with_longspan(MadeGRPO)(
            model=load_model(config=make_config(options.preset, options.layers), seed=0, sharded=True),
            reward_funcs=[score_by_chance],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
            processing_class=make_tokenizer(),
            callbacks=[clock],
            longspan=layout,
        )
        trainer.clock, trainer.lengths = clock, answer_lengths(options)
        trainer.train()
        plan = trainer._choices[True].plan([PROMPT + n for n in trainer.lengths], trainer.world.home)
        trainer.end()
    seconds = statistics.median(clock.updates[1:])
    tokens = sum(trainer.lengths) + PROMPT * options.answers
    return {
        "way": planner if planner == "dynamic" else f"cp {planner}",
        "seconds": round(seconds, 3),
        "tokens/s/rank": round(tokens / seconds / ranks, 1),
        "over the first": 1.0,
        "answers, seconds": round(statistics.median(clock.answers[1:]), 3),
        "peak GiB": peak_gib(),
        "micro-batches by degree": degrees_text(plan),
    }


def degrees_text(plan: Any) -> str:
    """How many micro-batches of a plan have documents at each degree."""
    counts = Counter(degree for batch in plan.micro_batches for degree in {group.degree for group in batch.groups})
    return ", ".join(f"cp {degree}: {count}" for degree, count in sorted(counts.items()))


class UpdateClock(TrainerCallback):
    """Seconds of updates, and of what comes before them: answers, rewards and advantages."""

    def __init__(self) -> None:
        self.updates: list[float] = []
        self.answers: list[float] = []
        self._began = 0.0

    def begin_update(self) -> None:
        """End answers and begin an update."""
        began = now()
        self.answers.append(began - self._began)
        self._began = began

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the first answers."""
        self._began = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an update."""
        ended = now()
        self.updates.append(ended - self._began)
        self._began = ended


class MadeGRPO(GRPOTrainer):
    """GRPO whose answers are random ids of the lengths that were set."""

    clock: UpdateClock
    lengths: list[int]

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        draw = np.random.default_rng(0)
        return [draw.integers(3, VOCABULARY, length).tolist() for length in self.lengths], None

    def compute_loss(self, *values: Any, **keywords: Any) -> Any:
        """The loss of GRPO, with which an update begins."""
        self.clock.begin_update()
        return super().compute_loss(*values, **keywords)


def score_by_chance(completions: list[Any], **_: Any) -> list[float]:
    """Rewards that differ."""
    return np.random.default_rng(1).random(len(completions)).tolist()


if __name__ == "__main__":
    main()

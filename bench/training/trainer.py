"""Steps of a Trainer beside those of a loop of one's own over the same plans: seconds, tokens/s, passes, peak bytes.

python bench/training/trainer.py --world 2 --cp 2                                              # two CPU processes
torchrun --nproc-per-node 2 bench/training/trainer.py --preset qwen3-8b --layers 12 --documents 16 --length 8192 \
    --cp 2 --dtype bfloat16 --out bench/records/trainer-H200.json                              # two GPUs

Ways: `loop` calls run_step and an AdamW; `Trainer` is transformers', whose loss takes one pass; `SFTTrainer` TRL's,
with its metrics; `own loss` a Trainer whose loss is another function of log-probabilities: one forward pass more.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from longspan.bench.layers import change_layer_count
from longspan.bench.record import open_record, origin_text, write_record
from longspan.comm import World
from longspan.hf import LongspanArguments, with_longspan
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table
from longspan.testing import run_ranks
from longspan.train import Document, PlanChoice, clip_grad_norm, run_step

WAYS = ("loop", "Trainer", "SFTTrainer", "own loss")
VOCABULARY = 2048
COLUMNS = ("way", "seconds a step", "tokens/s/rank", "over the loop", "peak GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-tiny")
    parser.add_argument("--layers", type=int, default=0, help="of the preset; 0: all")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--documents", type=int, default=8, help="of a step")
    parser.add_argument(
        "--length", type=int, default=512, help="of the longest; lengths fall evenly to a quarter of it"
    )
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="that are timed, after two")
    parser.add_argument("--world", type=int, default=1, help="local CPU processes; torchrun's ranks take its place")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rows = measure_ways(int(os.environ["RANK"]), options)
    else:
        rows = run_ranks(measure_ways, options.world, options, timeout=3600)[0]
    if int(os.environ.get("RANK", "0")):
        return
    about = {name: value for name, value in vars(options).items() if name != "out"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = open_record("Trainer and loop", None, device, Path(__file__).parent) | about | {"rows": rows}
    text = f"{markdown_table(COLUMNS, [[str(x) for x in row.values()] for row in rows])}\n\n{origin_text(record)}\n"
    if options.out:
        write_record(record, options.out, f"# Steps of a Trainer and of a loop\n\n{text}")
    print(text)


def measure_ways(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all ways, on this rank."""
    rows = list[dict[str, Any]]()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for way in WAYS:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median((run_loop(options) if way == "loop" else run_trainer(way, options, ranks))[2:])
        tokens = sum(lengths_of(options)) / seconds / ranks
        first = rows[0]["seconds a step"] if rows else seconds
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
        values = (way, round(seconds, 4), round(tokens, 1), round(seconds / first, 3), round(peak, 2))
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def lengths_of(options: argparse.Namespace) -> list[int]:
    return np.linspace(options.length, options.length / 4, options.documents).astype(int).tolist()


def make_documents(options: argparse.Namespace) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, length) for length in lengths_of(options)]


def make_model(options: argparse.Namespace) -> Any:
    config = preset_config(options.preset, vocab_size=VOCABULARY)
    config = change_layer_count(config, options.layers) if options.layers else config
    return load_model(config=config, dtype=options.dtype, seed=0)


def run_loop(options: argparse.Namespace) -> list[float]:
    """Seconds of steps of a loop of one's own."""
    device = None if torch.cuda.is_available() else "cpu"
    seconds = list[float]()
    with World(Layout(int(os.environ.get("WORLD_SIZE", "1"))), device=device) as world:
        model = prepare(make_model(options), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        documents = [Document(ids) for ids in make_documents(options)]
        for step in range(options.steps + 2):
            began = now()
            plan = PlanChoice.fixed(options.cp, cp_comm_type="auto").plan([len(d) for d in documents], world.home)
            run_step(model, plan, documents, world, step=step)
            clip_grad_norm(model, 1.0, world)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(now() - began)
    return seconds


def run_trainer(way: str, options: argparse.Namespace, ranks: int) -> list[float]:
    """Seconds of steps of a Trainer over the same documents."""
    clock = StepClock()
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in make_documents(options)]
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": -(-len(rows) // ranks),
            "max_steps": options.steps + 2,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "logging_steps": 10_000,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": not torch.cuda.is_available(),
            "bf16": False,
            "disable_tqdm": True,
            "remove_unused_columns": False,
        }
        data: Any = rows * (options.steps + 2)
        layout = LongspanArguments(context_parallel_size=options.cp, memory="none")
        keywords: dict[str, Any] = {"model": make_model(options), "train_dataset": data, "callbacks": [clock]}
        if way == "SFTTrainer":
            args = SFTConfig(**common, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
            args.activation_checkpointing = args.gradient_checkpointing = False
            keywords |= {"train_dataset": Dataset.from_list(data), "processing_class": make_tokenizer()}
            keywords["data_collator"] = pad
            trainer = with_longspan(SFTTrainer)(args=args, longspan=layout, **keywords)
        else:
            kind = OwnLoss if way == "own loss" else Trainer
            args = TrainingArguments(**common)
            trainer = with_longspan(kind)(args=args, data_collator=pad, longspan=layout, **keywords)
        trainer.train()
        trainer.end()
    return clock.seconds


class OwnLoss(Trainer):
    """A loss that is not the mean cross entropy."""

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean of the squares of log-probabilities."""
        out = model(**inputs, fused_lm_head=True)
        loss = (out.log_probs**2).sum() / num_items_in_batch
        return (loss, out) if return_outputs else loss


class StepClock(TrainerCallback):
    """Seconds from one optimizer step's end to the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the first step."""
        self._began = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step."""
        ended = now()
        self.seconds.append(ended - self._began)
        self._began = ended


def now() -> float:
    """Seconds, when the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch (B, L) of rows, padded on the right."""
    length = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    tables = {name: torch.full((len(rows), length), fill) for name, fill in batch.items()}
    for number, row in enumerate(rows):
        size = len(row["input_ids"])
        tables["input_ids"][number, :size] = torch.tensor(row["input_ids"])
        tables["labels"][number, 1:size] = torch.tensor(row["labels"][1:])
        tables["attention_mask"][number, :size] = 1
    return tables


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of a few words, as SFTTrainer wants one: rows here are ids already."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


if __name__ == "__main__":
    main()

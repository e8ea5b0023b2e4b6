"""Steps of a Trainer next to those of `longspan train` and of a loop of one's own, over the same plans.

python bench/training/trainer.py --world 2 --cp 2 --out bench/records/trainer-cpu.json         # two CPU processes
torchrun --nproc-per-node 1 bench/training/trainer.py --preset qwen3-8b --layers 12 --documents 8 --length 13107 \
    --dtype bfloat16 --memory auto --ways train SFTTrainer --out bench/records/trainer-H200.json  # 64K packed, one GPU

Ways: `train` is `longspan train`, `loop` calls run_step and an AdamW; `Trainer` is transformers', whose loss takes one
pass; `SFTTrainer` TRL's, with its metrics; `own loss` a Trainer whose loss is another function of log-probabilities:
one forward pass more. Seconds are the median of steps from end to end. Host ms are of one step more, under
torch.profiler: its seconds less those in operators and in waits for a device or for other ranks, so what Python takes.
Peak bytes are those of the GPU, and without one of the process.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from longspan.bench.layers import change_layer_count
from longspan.bench.record import open_record, origin_text, write_record
from longspan.comm import World
from longspan.config.file import load_config
from longspan.hf import LongspanArguments, with_longspan
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.testing import run_ranks
from longspan.train import Document, PlanChoice, clip_grad_norm, run_step

WAYS = ("train", "loop", "Trainer", "SFTTrainer", "own loss")
VOCABULARY = 2048
FIRST = 3  # steps that are not timed, in which kernels are compiled
COLUMNS = ("way", "seconds a step", "tokens/s/rank", "over the first", "host ms a step", "peak GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-tiny")
    parser.add_argument("--layers", type=int, default=0, help="of the preset; 0: all")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--documents", type=int, default=8, help="of a step")
    parser.add_argument("--length", type=int, default=512, help="of the longest document")
    parser.add_argument("--shortest", type=int, default=0, help="lengths fall evenly to this; 0: a quarter of --length")
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--rows", type=int, default=0, help="of a slot and micro-batch; 0: all documents at a time")
    parser.add_argument("--planner", default="fixed", choices=("fixed", "dynamic"), help="not of the loop")
    parser.add_argument("--steps", type=int, default=8, help="that are timed")
    parser.add_argument("--memory", default="none", choices=("none", "auto"), help="not for the loop")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--world", type=int, default=1, help="local CPU processes, without torchrun")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        figures = [measure_way(int(os.environ["RANK"]), way, options) for way in options.ways]
    else:
        figures = [run_ranks(measure_way, options.world, way, options, timeout=3600)[0] for way in options.ways]
    if int(os.environ.get("RANK", "0")):
        return
    rows = [dict(zip(COLUMNS, (*row[:3], round(row[1] / figures[0][1], 3), *row[3:]), strict=True)) for row in figures]
    about = {name: value for name, value in vars(options).items() if name != "out"} | {"load": os.getloadavg()[0]}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = open_record("Trainer and loop", None, device, Path(__file__).parent) | about | {"rows": rows}
    table = markdown_table(COLUMNS, [[str(x) for x in row.values()] for row in rows])
    text = f"{table}\n\n{_origin(options, record)}"
    if options.out:
        write_record(record, options.out, f"# Steps of a Trainer, of longspan train and of a loop\n\n{text}\n")
    print(text)


def _origin(options: argparse.Namespace, record: dict[str, Any]) -> str:
    lengths, model = lengths_of(options), f"{options.preset}, {options.layers or 'all'} layers, {options.dtype}"
    return (
        f"{model}, {options.planner} cp {options.cp}, memory {options.memory}, a step of {len(lengths)} documents of "
        f"{min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} in all; "
        f"{origin_text(record)}; load of the machine {record['load']:.1f}"
    )


def measure_way(rank: int, way: str, options: argparse.Namespace) -> tuple[Any, ...]:
    """The way, its seconds a step, tokens a second and rank, milliseconds of the host, and peak GiB, on this rank."""
    if gpu := torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = {"train": run_train, "loop": run_loop}.get(way, partial(run_trainer, way))(options)
    seconds = statistics.median(clock.seconds[FIRST : FIRST + options.steps])
    tokens = sum(lengths_of(options)) / seconds / int(os.environ.get("WORLD_SIZE", "1"))
    peak = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return way, round(seconds, 4), round(tokens, 1), round(1e3 * clock.host, 1), round(peak / 2**30, 2)


def lengths_of(options: argparse.Namespace) -> list[int]:
    shortest = options.shortest or options.length / 4
    return np.linspace(options.length, shortest, options.documents).astype(int).tolist()


def make_documents(options: argparse.Namespace) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, length) for length in lengths_of(options)]


def make_config(options: argparse.Namespace) -> Any:
    config = preset_config(options.preset, vocab_size=VOCABULARY)
    return change_layer_count(config, options.layers) if options.layers else config


def make_model(options: argparse.Namespace) -> Any:
    return load_model(config=make_config(options), dtype=options.dtype, seed=0)


def count_steps(options: argparse.Namespace) -> int:
    """Steps that compile, those that are timed, and one under the profiler."""
    return FIRST + options.steps + 1


def run_train(options: argparse.Namespace) -> "StepClock":
    """Steps of `longspan train`: its corpus has the documents of one step, which every step takes in another order."""
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    device = None if torch.cuda.is_available() else "cpu"
    clock = StepClock(options)
    with World(Layout(ranks), device=device) as world, tempfile.TemporaryDirectory() as made:
        folder = Path(world.control.broadcast_object(made))
        if rank == 0:
            make_config(options).save_pretrained(folder / "model")
            make_tokenizer().save_pretrained(folder / "model")
            lines = [json.dumps({"input_ids": ids.tolist()}) for ids in make_documents(options)]
            (folder / "rows.jsonl").write_text("\n".join(lines))
        world.control.barrier()
        keys = {"model.config": str(folder / "model"), "model.dtype": options.dtype, "run.dir": str(folder / "run")}
        keys |= {"data.path": str(folder / "rows.jsonl"), "data.tokenizer": str(folder / "model")}
        keys |= {"data.cache": str(folder / "tokens"), "data.eval_documents": 0, "data.max_document_tokens": 0}
        degree = {"context.context_parallel_size": options.cp} if options.planner == "fixed" else {}
        keys |= degree | {"context.max_tokens_per_slot": _rows(options)}
        keys |= {"context.cp_comm_type": "auto", "context.planner": options.planner, "train.memory": options.memory}
        keys |= {"train.steps": count_steps(options), "train.tokens_per_step": sum(lengths_of(options))}
        keys |= {"train.lr": 1e-4, "train.save_minutes": 0}
        config = load_config(None, keys)
        with _TimedDisplay(clock, config.train.steps) as display:
            train(config, world, display)
        world.control.barrier()
    return clock


class _TimedDisplay(ProgressDisplay):
    """Shows nothing, and tells a clock of steps."""

    def __init__(self, clock: "StepClock", steps: int) -> None:
        super().__init__(steps, None)
        self._clock = clock

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        if step == 1:
            self._clock.begin()

    def show_step(self, row: Any) -> None:
        """End a step."""
        self._clock.end_step()


def _rows(options: argparse.Namespace) -> int:
    """Rows of a slot: by default a group holds all documents of a step in one micro-batch."""
    return options.rows or -(-sum(lengths_of(options)) // options.cp) + 8 * options.documents * options.cp


def run_loop(options: argparse.Namespace) -> "StepClock":
    """Steps of a loop of one's own."""
    device = None if torch.cuda.is_available() else "cpu"
    clock = StepClock(options)
    with World(Layout(int(os.environ.get("WORLD_SIZE", "1"))), device=device) as world:
        model = prepare(make_model(options), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        documents = [Document(ids) for ids in make_documents(options)]
        choice = PlanChoice.fixed(options.cp, cp_comm_type="auto", max_tokens_per_slot=_rows(options))
        clock.begin()
        for step in range(count_steps(options)):
            plan = choice.plan([len(d) for d in documents], world.home)
            run_step(model, plan, documents, world, step=step)
            clip_grad_norm(model, 1.0, world)
            optimizer.step()
            optimizer.zero_grad()
            clock.end_step()
    return clock


def run_trainer(way: str, options: argparse.Namespace) -> "StepClock":
    """Steps of a Trainer over the same documents."""
    clock, ranks = StepClock(options), int(os.environ.get("WORLD_SIZE", "1"))
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in make_documents(options)]
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": -(-len(rows) // ranks),
            "max_steps": count_steps(options),
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
        data: Any = rows * count_steps(options)
        degree = {"planner": "dynamic"} if options.planner == "dynamic" else {"context_parallel_size": options.cp}
        layout = LongspanArguments(**degree, memory=options.memory, max_tokens_per_slot=str(_rows(options)))
        keywords: dict[str, Any] = {"model": make_model(options), "train_dataset": data, "callbacks": [clock]}
        if way == "SFTTrainer":
            from datasets import Dataset
            from trl import SFTConfig, SFTTrainer

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
    return clock


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
    """Seconds from one optimizer step's end to the next; the last step is profiled, and not among them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.seconds: list[float] = []
        self.host = 0.0  # seconds of the host in the profiled step
        self._last, self._began = count_steps(options), 0.0
        self._profile: Any = None

    def begin(self) -> None:
        """Begin the first step."""
        self._began = now()

    def end_step(self) -> None:
        """End a step."""
        ended = now()
        self.seconds.append(ended - self._began)
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.host = self.seconds.pop() - _busy_seconds(self._profile)
            self._profile = None
        elif len(self.seconds) == self._last - 1:
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.__enter__()
        self._began = now()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the first step of a Trainer."""
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step of a Trainer."""
        self.end_step()


def _busy_seconds(profiled: Any) -> float:
    """Seconds in which the main thread was in an operator, or waited for a device or for other ranks."""
    events = [event for event in profiled.events() if event.device_type.name == "CPU" and not event.is_async]
    ranges = [event.time_range for event in events if event.thread == events[0].thread]
    spans = sorted((within.start, within.end) for within in ranges)
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6


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
    """A tokenizer of as many words as the model has embeddings: rows here are ids already."""
    words = Tokenizer(WordLevel({f"word{i}": i for i in range(VOCABULARY)}, unk_token="word2"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0", eos_token="word1", unk_token="word2")


if __name__ == "__main__":
    main()

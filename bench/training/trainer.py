"""Steps of a Trainer next to those of `longspan train` and of a loop of one's own, over the same plans.

python bench/training/trainer.py --world 2 --cp 2 --out bench/records/trainer-cpu.json         # two CPU processes
torchrun --nproc-per-node 2 bench/training/trainer.py --preset qwen3-8b --layers 12 --documents 8 --length 13107 \
    --cp 2 --plan_memory --ways train --out bench/records/trainer-2xH200.json              # 64K packed, two GPUs

Ways: `train` is `longspan train`, `loop` calls run_step and an AdamW; `Trainer` is transformers', whose loss takes one
pass; `SFTTrainer` TRL's, with its metrics; `TRL cp` the stock SFTTrainer under the context parallelism of accelerate
(FSDP2, SDPA), which refuses packed rows: a document a row and micro-batch. Parameters are float32, on GPUs all ways
compute in bfloat16.
Seconds are the median of steps from end to end, as the host sees them. Host ms are of one step more, under
torch.profiler: its seconds less those in operators and in waits, so what Python takes. Peak bytes are those of the GPU,
without one of the process. On GPUs run one way a command: each adds its row to the record.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from bench.begun import missing_row, open_record, peak_bytes, seconds_now, start_peak, write_page
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from longspan.bench.benches import change_layer_count
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
from longspan.train import Document, PlannerConfig, clip_grad_norm, run_step

STOCK = "TRL cp"
WAYS = ("train", "loop", "Trainer", "SFTTrainer")
VOCABULARY = 2048  # ids of documents; published models have more rows
FIRST = 3  # steps that are not timed, in which kernels are compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-tiny")
    parser.add_argument("--layers", type=int, default=0, help="of the preset; 0: all")
    parser.add_argument("--documents", type=int, default=8, help="of a step, a multiple of the ranks")
    parser.add_argument("--length", type=int, default=512, help="of the longest document")
    parser.add_argument("--shortest", type=int, default=0, help="lengths fall evenly to this; 0: a quarter of --length")
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--rows", type=int, default=0, help="of a slot and micro-batch; 0: all documents at a time")
    parser.add_argument("--steps", type=int, default=8, help="that are timed")
    parser.add_argument("--plan_memory", action="store_true", help="choose what layers keep; not for the loop")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=(*WAYS, STOCK))
    parser.add_argument("--world", type=int, default=1, help="local CPU processes, without torchrun")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rows = [measure_way(int(os.environ["RANK"]), way, options) for way in options.ways]
    else:
        rows = [run_ranks(measure_way, options.world, way, options, timeout=3600)[0] for way in options.ways]
    if int(os.environ.get("RANK", "0")):
        return
    facts = {name: value for name, value in vars(options).items() if name not in ("out", "ways", "steps")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = open_record("Trainer and loop", options.out, device, Path(__file__).parent, options=facts)
    ways = {row["way"]: row for row in [*record.get("rows", []), *rows]}
    first = next((row["seconds"] for row in ways.values() if row.get("seconds")), None)
    for row in ways.values():
        if row.get("seconds"):
            row["over the first"] = round(row["seconds"] / first, 3)
    record["rows"] = list(ways.values())
    columns = list(dict.fromkeys(name for row in record["rows"] for name in row))
    table = markdown_table(columns, [[str(row.get(name, "")) for name in columns] for row in record["rows"]])
    lengths = lengths_of(options)
    planned = "planned" if options.plan_memory else "not planned"
    about = (
        f"{options.preset}, {options.layers or 'all'} layers, fixed cp {options.cp}, memory {planned}, a step of "
        f"{len(lengths)} documents of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} in all"
    )
    title = "Steps of a Trainer, of longspan train and of a loop"
    write_page(record, options.out, title, f"{table}\n\n{about}")


def measure_way(rank: int, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a way on this rank: seconds a step, tokens a second and rank, milliseconds of the host, peak GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    start_peak()
    run = {"train": run_train, "loop": run_loop, STOCK: run_stock}.get(way, partial(run_trainer, way))
    try:
        clock = run(options)
    except Exception as error:
        if way != STOCK:
            raise
        traceback.print_exc()
        return {"way": way, **missing_row(error)}
    seconds = statistics.median(clock.seconds[FIRST : FIRST + options.steps])
    return {
        "way": way,
        "seconds": round(seconds, 4),
        "tokens/s/rank": round(sum(lengths_of(options)) / seconds / world_size(), 1),
        "over the first": 1.0,
        "host ms": round(1e3 * clock.host, 1),
        "peak GiB": round((peak_bytes() or 1024 * getrusage(RUSAGE_SELF).ru_maxrss) / 2**30, 2),
    }


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def lengths_of(options: argparse.Namespace) -> list[int]:
    shortest = options.shortest or options.length / 4
    return np.linspace(options.length, shortest, options.documents).astype(int).tolist()


def make_documents(options: argparse.Namespace) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, length) for length in lengths_of(options)]


def make_model(options: argparse.Namespace) -> Any:
    config = make_config(options.preset, options.layers)
    return load_model(config=config, dtype="float32", seed=0, sharded=True)


def count_steps(options: argparse.Namespace) -> int:
    return FIRST + options.steps + 1


class StepClock(TrainerCallback):
    """Seconds from one optimizer step's end to the next; the last step is profiled, and not among them.

    A step ends when the host says so, which read its loss by then: the device may still update, and the host prepare
    the next step meanwhile, as in training. Only the first step and the profiled one begin on an idle device.
    """

    def __init__(self, steps: int) -> None:
        self.seconds: list[float] = []
        self.host = 0.0  # seconds of the host in the profiled step
        self._last = steps
        self._began = 0.0
        self._profile: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = seconds_now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = seconds_now() if self._profile is not None else perf_counter()
        self.seconds.append(ended - self._began)
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.host = self.seconds.pop() - _busy_seconds(self._profile)
            self._profile = None
        elif len(self.seconds) == self._last - 1:
            self._profile = profile(activities=[ProfilerActivity.CPU])
            seconds_now()
            self._profile.__enter__()
            ended = perf_counter()
        self._began = ended


def _busy_seconds(profiled: Any) -> float:
    """Seconds in which the main thread was in an operator, or waited for a device or for other ranks."""
    events = [event for event in profiled.events() if event.device_type.name == "CPU" and not event.is_async]
    ranges = [event.time_range for event in events if event.thread == events[0].thread]
    spans = sorted((within.start, within.end) for within in ranges)
    busy = 0.0
    until = 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6


def run_train(options: argparse.Namespace) -> StepClock:
    """Steps of `longspan train`: its corpus has the documents of one step, which every step takes in another order."""
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    device = None if torch.cuda.is_available() else "cpu"
    clock = StepClock(count_steps(options))
    with World(Layout(ranks), device=device) as world, tempfile.TemporaryDirectory() as made:
        folder = Path(world.control.broadcast_object(made))
        if rank == 0:
            make_config(options.preset, options.layers).save_pretrained(folder / "model")
            make_tokenizer().save_pretrained(folder / "model")
            lines = [json.dumps({"input_ids": ids.tolist()}) for ids in make_documents(options)]
            (folder / "rows.jsonl").write_text("\n".join(lines))
        world.control.barrier()
        keys = {"model.config": str(folder / "model"), "model.dtype": "float32", "run.dir": str(folder / "run")}
        keys |= {"data.path": str(folder / "rows.jsonl"), "data.tokenizer": str(folder / "model")}
        keys |= {"evaluation.documents": 0, "data.max_document_tokens": 0}
        keys |= {"context.context_parallel_size": options.cp, "context.max_tokens_per_slot": _rows(options)}
        keys |= {"context.cp_comm_type": "auto", "context.planner": "fixed", "train.plan_memory": options.plan_memory}
        keys |= {"train.steps": count_steps(options) + 1, "train.tokens_per_step": sum(lengths_of(options))}
        keys |= {"optimizer.lr": 1e-4, "checkpoint.minutes": 0}
        config = load_config(None, keys)
        with _TimedDisplay(clock, config.train.steps) as display, suppress(_EndOfRunError):
            train(config, world, display)
        world.control.barrier()
    return clock


class _EndOfRunError(Exception):
    """The last step that is measured; a run that ends by it writes no checkpoint."""


class _TimedDisplay(ProgressDisplay):
    """Shows nothing, tells a clock of steps, and ends the run before its last step."""

    def __init__(self, clock: StepClock, steps: int) -> None:
        super().__init__(steps, None)
        self._clock = clock
        self._last = steps - 1
        self._measured = 0

    def show_step(self, row: Any) -> None:
        self._clock.on_step_end()
        self._measured += 1
        if self._measured == self._last:
            raise _EndOfRunError


def _rows(options: argparse.Namespace) -> int:
    """Rows of a slot: by default a group holds all documents of a step in one micro-batch."""
    return options.rows or -(-sum(lengths_of(options)) // options.cp) + 8 * options.documents * options.cp


def run_loop(options: argparse.Namespace) -> StepClock:
    device = None if torch.cuda.is_available() else "cpu"
    clock = StepClock(count_steps(options))
    with World(Layout(world_size()), device=device) as world:
        model = prepare(make_model(options), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        documents = [Document(ids) for ids in make_documents(options)]
        choice = PlannerConfig.fixed(options.cp, cp_comm_type="auto", max_tokens_per_slot=_rows(options))
        clock.on_train_begin()
        for step in range(count_steps(options)):
            plan = choice.plan([len(d) for d in documents], world.home)
            run_step(model, plan, documents, world, step=step)
            clip_grad_norm(model, 1.0, world)
            optimizer.step()
            optimizer.zero_grad()
            clock.on_step_end()
    return clock


def arguments(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all trainers have; on GPUs over float32 they compute in bfloat16, as `longspan train` does."""
    gpu = torch.cuda.is_available()
    newer = hasattr(TrainingArguments, "activation_checkpointing")
    return {
        "output_dir": folder,
        "max_steps": count_steps(options),
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,  # as `longspan train`, which writes a row of every step
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not gpu,
        "bf16": gpu,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "activation_checkpointing" if newer else "gradient_checkpointing": False,
    }


def run_trainer(way: str, options: argparse.Namespace) -> StepClock:
    clock = StepClock(count_steps(options))
    ranks = world_size()
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in make_documents(options)]
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = arguments(folder, options) | {"per_device_train_batch_size": -(-len(rows) // ranks)}
        data: Any = rows * count_steps(options)
        layout = LongspanArguments(
            context_parallel_size=options.cp, plan_memory=options.plan_memory, max_tokens_per_slot=str(_rows(options))
        )
        keywords: dict[str, Any] = {"model": make_model(options), "train_dataset": data, "callbacks": [clock]}
        if way == "SFTTrainer":
            from datasets import Dataset
            from trl import SFTConfig, SFTTrainer

            args = SFTConfig(**common, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
            keywords |= {"train_dataset": Dataset.from_list(data), "processing_class": make_tokenizer()}
            keywords["data_collator"] = pad
            trainer = with_longspan(SFTTrainer)(args=args, longspan=layout, **keywords)
        else:
            args = TrainingArguments(**common)
            trainer = with_longspan(Trainer)(args=args, data_collator=pad, longspan=layout, **keywords)
        trainer.train()
        trainer.end()
    return clock


def run_stock(options: argparse.Namespace) -> StepClock:
    """Steps of TRL's SFTTrainer under accelerate's context parallelism; each document is a row and a micro-batch."""
    from accelerate import ParallelismConfig
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    clock = StepClock(count_steps(options))
    ranks = world_size()
    rows = [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in make_documents(options)]
    sharding = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "activation_checkpointing": True,
        "cpu_ram_efficient_loading": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            **arguments(folder, options),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(rows),
            parallelism_config=ParallelismConfig(cp_size=ranks),
            fsdp=True,  # pyright: ignore[reportArgumentType]
            fsdp_config=sharding,
            max_length=None,
            pad_to_multiple_of=2 * ranks,  # as its documentation asks for
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        config = make_config(options.preset, options.layers)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_list(rows * count_steps(options)),
            processing_class=make_tokenizer(),
            callbacks=[clock],
        )
        trainer.train()
    return clock


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


def make_config(preset: str, layers: int) -> Any:
    config = preset_config(preset, vocab_size=VOCABULARY)
    return change_layer_count(config, layers) if layers else config


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the model has embeddings: rows here are ids already."""
    words = Tokenizer(WordLevel({f"word{i}": i for i in range(VOCABULARY)}, unk_token="word2"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0", eos_token="word1", unk_token="word2")


if __name__ == "__main__":
    main()

"""What the benchmarks of trainers share: a clock of optimizer steps, a tokenizer of made ids, rows of a record.

torchrun --nproc-per-node 2 -m bench.training.trainer --ways SFTTrainer --cp 2
"""

import argparse
import gc
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast, TrainerCallback

from longspan.bench.benches import change_layer_count, origin_text, write_record
from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table

VOCABULARY = 2048  # ids of documents; published models have more rows


def make_config(preset: str, layers: int) -> Any:
    """A preset's configuration, with so many layers; 0: all."""
    config = preset_config(preset, vocab_size=VOCABULARY)
    return change_layer_count(config, layers) if layers else config


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

    def begin(self) -> None:
        """Begin the first step."""
        self._began = now()

    def end_step(self) -> None:
        """End a step."""
        ended = now() if self._profile is not None else time.perf_counter()
        self.seconds.append(ended - self._began)
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.host = self.seconds.pop() - _busy_seconds(self._profile)
            self._profile = None
        elif len(self.seconds) == self._last - 1:
            self._profile = profile(activities=[ProfilerActivity.CPU])
            now()
            self._profile.__enter__()
            ended = time.perf_counter()
        self._began = ended

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
    busy = 0.0
    until = 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6


def now() -> float:
    """Seconds, when the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the model has embeddings: rows here are ids already."""
    words = Tokenizer(WordLevel({f"word{i}": i for i in range(VOCABULARY)}, unk_token="word2"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0", eos_token="word1", unk_token="word2")


def start_peak() -> None:
    """Begin to measure a GPU's peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """The peak of the GPU, without one of the process."""
    gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 2**30, 2)


def add_rows(bench: str, about: argparse.Namespace, rows: list[dict[str, Any]], source: Path) -> dict[str, Any]:
    """The record at `about.out` with these rows, each in place of one of its way; else a new record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    outside = ("out", "ways", "planners", "steps", "updates")
    options = {name: value for name, value in vars(about).items() if name not in outside}
    record = open_record(bench, about.out, device, source, options=options)
    ways = {row["way"]: row for row in [*record.get("rows", []), *rows]}
    first = next((row["seconds"] for row in ways.values() if row.get("seconds")), None)
    for row in ways.values():
        if row.get("seconds"):
            row["over the first"] = round(row["seconds"] / first, 3)
    return record | {"load": os.getloadavg()[0], "rows": list(ways.values())}


def write_rows(record: dict[str, Any], out: Path | None, title: str, about: str) -> None:
    """Print a record's rows, and write them to `out` and beside it where that is given."""
    columns = list(dict.fromkeys(name for row in record["rows"] for name in row))
    table = markdown_table(columns, [[str(row.get(name, "")) for name in columns] for row in record["rows"]])
    text = f"{table}\n\n{about}; {origin_text(record)}; load of the machine {record['load']:.1f}"
    if out:
        write_record(record, out, f"# {title}\n\n{text}\n")
    print(text)

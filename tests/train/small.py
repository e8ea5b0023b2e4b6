"""A run that takes a second: a few short texts, a tiny vocabulary, a handful of steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longspan import World
from longspan.config.file import load_config
from longspan.config.keys import key_value
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import train_tokenizer
from longspan.model import load_model
from longspan.run.checks import check_config
from longspan.run.facts import TrainResult
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.testing import backend
from tests.model.stock import without_trials

WORDS = ("def", "class", "return", "import", "self", "value", "for", "while", "yield", "None")
WORDS += ("rank", "slot", "plan", "ring")

SMALL = {
    "data.vocab_size": 300,
    "data.max_document_tokens": 64,
    "evaluation.documents": 3,
    "context.context_parallel_size": 2,
    "context.max_tokens_per_slot": 64,
    "evaluation.context_parallel_size": 2,
    "evaluation.max_tokens_per_slot": 64,
    "train.steps": 6,
    "train.tokens_per_step": 128,
    "optimizer.lr": 6e-3,
    "optimizer.warmup_steps": 2,
    "evaluation.every": 2,
    "run.timeout_seconds": 60.0,
    "checkpoint.save_total_limit": 0,
}


def write_texts(folder: Path, count: int = 12) -> Path:
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        words = draw.choice(WORDS, size=int(draw.integers(5, 90)))
        (folder / f"file{i:02}.py").write_text(" ".join(words) + "\n")
    return folder


def write_model(root: Path) -> None:
    texts = [file.read_text() for file in sorted(write_texts(root / "texts").iterdir())]
    load_model(preset="qwen3-tiny", vocab_size=300, seed=3).save_pretrained(root / "model")
    train_tokenizer(texts, 300).save_pretrained(root / "model")


def small_config(folder: Path, **changes: object) -> RunConfig:
    """A configuration of a small run in `folder/run` on texts in `folder/texts`; keys with `__` for the dot;
    None leaves a key out."""
    given = {key.replace("__", "."): value for key, value in changes.items()}
    paths = {"data.path": str(write_texts(folder / "texts")), "run.dir": str(folder / "run")}
    values = SMALL | paths | given
    return load_config(None, {key: value for key, value in values.items() if value is not None})


def train_rank(rank: int, config: RunConfig, ranks: int) -> TrainResult:
    home = check_config(config, ranks)
    with (
        without_trials(),
        World(home, backend=backend(), timeout=config.run.timeout_seconds) as world,
        ProgressDisplay(config.train.steps, None) as display,
    ):
        return train(config, world, display)


_TIMES = {"seconds", "tokens_per_second", "memory_bytes", "tflops", "save_shown_seconds", "save_seconds", "save_bytes"}


def without_times(row: Mapping[str, object]) -> dict[str, object]:
    return {k: v for k, v in row.items() if k not in _TIMES}


def value_of(config: RunConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    return key_value(getattr(config, section), key)

"""`longspan train` over rows with images: losses at any degree, pixels read ahead by who encodes them, samples."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2_5_VLConfig

from longspan.cli.eval import main as eval_main
from longspan.report import write_report
from longspan.testing import run_ranks
from longspan.train.config.file import load_config
from longspan.train.config.sections import RunConfig
from longspan.train.data.image_reader import ImageReader
from longspan.train.run.records.metrics_log import read_metrics
from tests.train.data.images.folders import qwen_folder, write_images, write_rows
from tests.train.homes import farthest
from tests.train.small import train_rank

ROWS = 24
SETTINGS: dict[str, Any] = {
    "model.dtype": "float64",
    "data.max_document_tokens": 0,
    "data.eval_documents": 4,
    "context.context_parallel_size": 2,
    "context.max_tokens_per_slot": 96,
    "context.eval_context_parallel_size": 2,
    "context.eval_max_tokens_per_slot": 96,
    "train.steps": 4,
    "train.tokens_per_step": 160,
    "train.lr": 3e-3,
    "train.warmup_steps": 1,
    "train.eval_every": 2,
    "run.timeout_seconds": 60.0,
}
COLUMNS = ("loss", "grad_norm", "eval_loss")


def write_model(folder: Path) -> Path:
    """A folder of a small Qwen2.5-VL without weights."""
    qwen_folder(folder)
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text |= {"intermediate_size": 48, "vocab_size": 264, "rope_parameters": rope, "initializer_range": 0.1}
    vision = {"hidden_size": 16, "depth": 2, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    ids = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 258, "vision_end_token_id": 259}
    Qwen2_5_VLConfig(
        text_config=text | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        vision_config=vision,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **ids,
    ).save_pretrained(folder)
    return folder


def config_of(folder: Path, **changes: Any) -> RunConfig:
    """A run over conversations of none to two images, and texts in which images are named."""
    names = write_images(folder / "data", [(16, 16), (8, 24), (20, 33), (24, 8)])
    answer = {"role": "assistant", "content": "yes"}
    rows = []
    for i in range(ROWS):
        shown = [names[(i + k) % 4] for k in range(i % 3)]
        question = {"role": "user", "content": "<image> and " * len(shown) + "so?" * (1 + i % 4)}
        rows.append({"messages": [question, answer]} | ({"images": shown} if shown else {}))
    paths = {
        "model.config": str(write_model(folder / "model")),
        "data.path": str(write_rows(folder / "data" / "rows.jsonl", rows)),
        "data.cache": str(folder / "cache"),
        "run.dir": str(folder / "run"),
    }
    return load_config(None, SETTINGS | paths | changes)


def losses_of(config: RunConfig) -> dict[str, list[float]]:
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    losses = {key: [float(row[key]) for row in rows if key in row] for key in COLUMNS}
    return {**losses, "eval_loss": losses["eval_loss"][:2]}  # others are at further degrees


def train_and_count(rank: int, config: RunConfig, ranks: int) -> tuple[int, int]:
    """Train on this rank; how many images it read, and how many of them it had begun to read ahead."""
    read, asked_ahead = [], []
    input_of, ahead = ImageReader._input, ImageReader.ahead
    ImageReader._input = lambda self, number: read.append(number) or input_of(self, number)  # type: ignore[method-assign]
    ImageReader.ahead = lambda self, numbers: ahead(self, [asked_ahead.append(n) or n for n in numbers])  # type: ignore[method-assign, func-returns-value]
    try:
        train_rank(rank, config, ranks)
    finally:
        ImageReader._input, ImageReader.ahead = input_of, ahead  # type: ignore[method-assign]
    return len(read), len(asked_ahead)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[tuple[int, int]]]:
    """A run over two slots that share documents, and what each rank read."""
    config = config_of(tmp_path_factory.mktemp("images"))
    return config, run_ranks(train_and_count, 2, config, 2, timeout=200)


def test_losses_are_those_of_one_rank(trained: tuple[RunConfig, Any], tmp_path: Path) -> None:
    config, _ = trained
    context = replace(config.context, context_parallel_size=1, eval_context_parallel_size=1)
    context = replace(context, max_tokens_per_slot=192, eval_max_tokens_per_slot=192)
    alone = replace(config, context=context, run=replace(config.run, dir=str(tmp_path / "run")))
    run_ranks(train_rank, 1, alone, 1, timeout=200)
    wanted, found = losses_of(alone), losses_of(config)
    assert all(farthest(found[key], wanted[key]) <= 1e-6 for key in COLUMNS)
    assert len(found["loss"]) == 4 and found["loss"][-1] < found["loss"][0]


def test_a_rank_reads_its_images_alone_and_ahead(trained: tuple[RunConfig, Any]) -> None:
    (read, ahead), (read_too, ahead_too) = trained[1]
    assert read and read_too and ahead and ahead_too
    assert max(read, read_too) < 0.75 * (read + read_too)


def test_the_report_shows_samples(trained: tuple[RunConfig, Any]) -> None:
    folder = Path(trained[0].run.dir)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert rows and all(row["answer"] == "yes" and row["text"].count("<image>") == len(row["images"]) for row in rows)
    html = write_report(folder).read_text()
    assert html.count("data:image/png;base64,") == sum(len(row["images"]) for row in rows)


def test_saved_folders_have_the_processor_and_are_evaluated(
    trained: tuple[RunConfig, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(trained[0].run.dir)
    assert (folder / "model" / "preprocessor_config.json").is_file()
    assert eval_main([str(folder), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)

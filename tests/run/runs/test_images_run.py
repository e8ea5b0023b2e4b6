"""`longspan train` on rows with images: equal at any degree of either module, saved and exported."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, Gemma3Config, PreTrainedConfig, Qwen2_5_VLConfig

from longspan.checkpoint.export import export_checkpoint
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.model.multimodal.image_modules import freeze_image_modules
from longspan.run.metrics import read_metrics
from tests.corpus.images.folders import GEMMA_TOKENS, gemma3_folder, qwen_folder, write_images, write_rows
from tests.model.vision.models import MODELS, MROPE, QWEN, TEXT, tiny
from tests.run.runs.homes import farthest, train_rows

SIZES = [(16, 24), (32, 16), (16, 16), (8, 8), (24, 24), (40, 16)]
SPECIAL = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
SPECIAL |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}


def model_folder(folder: Path) -> Path:
    tokenizer: Any = AutoTokenizer.from_pretrained(qwen_folder(folder))
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in SPECIAL.items()}
    vision = QWEN | {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    return _with_model(
        folder, Qwen2_5_VLConfig(text_config=TEXT | MROPE | {"vocab_size": len(tokenizer)}, vision_config=vision, **ids)
    )


def gemma_folder(folder: Path) -> Path:
    tokenizer: Any = AutoTokenizer.from_pretrained(gemma3_folder(folder))
    ids = {f"{key}_index": tokenizer.convert_tokens_to_ids(token) for key, token in GEMMA_TOKENS.items()}
    values = MODELS["gemma3"][1] | ids
    values["text_config"] = values["text_config"] | {"vocab_size": len(tokenizer)}
    return _with_model(folder, Gemma3Config(**values))


def _with_model(folder: Path, config: PreTrainedConfig) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def rows_with_images(folder: Path) -> Path:
    draw, names = random.Random(0), write_images(folder, SIZES)
    rows = [_row(draw.choices(names, k=draw.choice((0, 1, 2, 3))), draw.randint(1, 8), i) for i in range(20)]
    return write_rows(folder / "rows.jsonl", rows)


def _row(images: list[str], words: int, number: int) -> dict[str, Any]:
    shown = [part for _ in images for part in ({"type": "text", "text": "see "}, {"type": "image"})]
    content = [*shown, {"type": "text", "text": "what? " + "word " * words}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"it is {number}"}]
    return {"messages": messages} | ({"images": images} if images else {})


def settings(folder: Path, rows: Path, model: Path, **changes: Any) -> RunConfig:
    given = {"model.path": str(model), "model.dtype": "float64", "run.dir": str(folder), "train.steps": 4}
    given |= {"data.path": str(rows), "evaluation.documents": 2}
    given |= {"train.tokens_per_step": 600, "optimizer.lr": 1e-3, "checkpoint.every": 2, "evaluation.every": 4}
    given |= {"encoder.lr": 2e-3, "encoder.max_tokens": 64}
    return load_config(None, given | {key.replace("__", "."): value for key, value in changes.items()})


def train_at_two_degrees(tmp_path: Path, model: Path) -> None:
    """Losses and gradient norms over two slots, with an encoder of tp 2, are those of one rank."""
    rows, keys = rows_with_images(tmp_path / "rows"), {"train__steps": 2, "train__tokens_per_step": 400}
    alone = settings(tmp_path / "one", rows, model, context__max_tokens_per_slot=256, **keys)
    keys |= {"context__context_parallel_size": 2, "context__max_tokens_per_slot": 128, "encoder__tp": 2}
    two = settings(tmp_path / "two", rows, model, **keys)
    wanted, found = (
        [float(row[key]) for row in train_rows(config, ranks) for key in ("loss", "grad_norm")]
        for config, ranks in ((alone, 1), (two, 2))
    )
    assert len(wanted) == 4 and farthest(found, wanted) < 1e-6  # norms and rotary angles are in float32


def test_a_run_with_images(tmp_path: Path) -> None:
    train_at_two_degrees(tmp_path, model_folder(tmp_path / "model"))
    steps = [row for row in read_metrics(tmp_path / "two" / "metrics.jsonl") if "grad_norm" in row]
    assert all(0 < row["encoder_share"] < 1 and row["tflops"] > 0 for row in steps)
    assert all(0 < row["predicted_encoder_share"] < 1 for row in steps)
    saved: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "two" / "model")
    exported = export_checkpoint(tmp_path / "two", None, tmp_path / "out", print)
    again: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert exported.tensors == len(saved.state_dict()) and (tmp_path / "out" / "preprocessor_config.json").is_file()
    assert all(torch.equal(x, y) for x, y in zip(saved.parameters(), again.parameters(), strict=True))


@pytest.mark.whole
def test_a_run_with_images_that_see_each_other(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    train_at_two_degrees(tmp_path, gemma_folder(tmp_path / "model"))


@pytest.mark.whole
def test_images_of_an_evaluation_set_alone(tmp_path: Path) -> None:
    """A run over texts evaluates rows with images as a run over these rows does, whose weights are the same."""
    model, shown = model_folder(tmp_path / "model"), rows_with_images(tmp_path / "rows")
    texts = write_rows(tmp_path / "texts.jsonl", [_row([], 5, number) for number in range(20)])
    keys = {"train__steps": 1, "evaluation__documents": 0, "context__max_tokens_per_slot": 256}
    keys |= {"optimizer__lr": 1e-12, "encoder__lr": 1e-12}
    losses = list[float]()
    for rows in (shown, texts):
        sets = [{"path": str(shown), "name": "shown"}]
        train_rows(settings(tmp_path / rows.stem, rows, model, evaluation__sets=sets, **keys), 1)
        metrics = read_metrics(tmp_path / rows.stem / "metrics.jsonl")
        losses += [row["eval_loss"] for row in metrics if "eval_loss" in row]
    assert len(losses) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize(("trained", "names"), [("all", 42), ("projector", 5), ("none", 0)])
def test_parts_that_are_trained(trained: Any, names: int) -> None:
    model = tiny("qwen2.5-vl")
    freeze_image_modules(model, trained)
    of_images = {n for n, p in model.named_parameters() if n.startswith("model.visual.") and p.requires_grad}
    assert len(of_images) == names and (trained != "projector" or all(".merger." in name for name in of_images))
    assert all(p.requires_grad for n, p in model.named_parameters() if not n.startswith("model.visual."))

"""`longspan train` with [mtp] over rows with images: equal at any degree, gone on with, saved and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from longspan.cli.export import main as export_main
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.model import add_mtp, load_model
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.run.runs.homes import farthest, gone_on_from_the_first_checkpoint
from tests.run.runs.test_images_run import model_folder, rows_with_images, settings
from tests.train.small import train_rank

ONE = {"context__max_tokens_per_slot": 256}
TWO = {"context__context_parallel_size": 2, "context__max_tokens_per_slot": 128, "encoder__tp": 2}
KEYS = {"mtp__depths": 1, "mtp__loss_weight": 0.5}
LORA = {"lora__rank": 4, "train__lr": 0.02, "encoder__train": "projector", "mtp__train_whole": True}


def losses(config: RunConfig, ranks: int) -> list[float]:
    run_ranks(train_rank, ranks, config, ranks, timeout=200)
    rows = [row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if "grad_norm" in row]
    return [float(row[key]) for row in rows for key in ("loss", "mtp_loss_1", "grad_norm")]


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*are no part of the.*itself")  # the depths, which are added then
@pytest.mark.parametrize("more", [{}, LORA], ids=["all weights", "whole depths beside an adapter"])
def test_depths_beside_images(more: dict[str, Any], tmp_path: Path) -> None:
    model, rows = model_folder(tmp_path / "model"), rows_with_images(tmp_path / "rows")
    two, alone = (settings(tmp_path / n, rows, model, **KEYS, **more, **keys) for n, keys in (("2", TWO), ("1", ONE)))
    wanted = losses(alone, 1)
    assert len(wanted) == 12 and farthest(losses(two, 2), wanted) < 1e-6  # norms and rotary angles are in float32
    for name, parallel in {"tp": ParallelConfig(tp=2), "pp": ParallelConfig(pp=2)}.items():
        other = gone_on_from_the_first_checkpoint(alone, tmp_path / name, parallel)
        assert farthest(losses(other, 2), wanted) < 1e-6
    words = ["--merge"] if more else []
    assert export_main([two.run.dir, str(tmp_path / "out"), *words]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")  # without depths
    read = add_mtp(load_model(tmp_path / "out", images=True, sharded=False), 1, weights=tmp_path / "out")
    saved = load_file(Path(two.run.dir) / "model" / ("adapter_model.safetensors" if more else "model.safetensors"))
    depths = {name.removeprefix("base_model.model."): x for name, x in saved.items() if "mtp.layers.0." in name}
    assert depths and all(torch.equal(x.to(weights[name].dtype), weights[name]) for name, x in depths.items())
    assert all((read.get_parameter(name) - x).abs().max() < 1e-2 for name, x in depths.items())

"""A run of `longspan train` with [mtp]: its losses at any degree, and what it saves, resumes, exports and evaluates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longspan.cli.eval import main as eval_main
from longspan.cli.export import main as export_main
from longspan.config.file import to_toml
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.errors import ConfigError, ModelError
from longspan.model import add_mtp, load_model
from longspan.report import write_report
from longspan.report.run_folder import RunFolder
from longspan.run.metrics import read_metrics
from tests.run.runs.homes import farthest, gone_on_from_the_first_checkpoint, train_rows
from tests.train.small import small_config

KEYS = {"mtp__num_layers": 2, "mtp__loss_scaling_factor": 0.5, "model__dtype": "float64"}
STEPS = {"train__steps": 3, "checkpoint__every": 2, "evaluation__every": 3}
COLUMNS = ("loss", "mtp_loss_1", "mtp_loss_2", "grad_norm", "eval_loss")

Losses = dict[str, list[float]]
Trained = tuple[RunConfig, Losses]


def run(config: RunConfig, ranks: int) -> Losses:
    train_rows(config, ranks)
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    losses = {key: [float(row[key]) for row in rows if key in row] for key in COLUMNS}
    return {**losses, "eval_loss": losses["eval_loss"][:1]}  # others are at further degrees


def close(found: Losses, wanted: Losses) -> bool:
    return all(farthest(found[key], wanted[key]) <= 1e-9 for key in COLUMNS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    config = small_config(tmp_path_factory.mktemp("mtp"), **KEYS, **STEPS)
    return config, run(config, 2)


def alone(config: RunConfig, folder: Path) -> RunConfig:
    alone = {"context_parallel_size": 1, "max_tokens_per_slot": 128}
    context, evaluation = replace(config.context, **alone), replace(config.evaluation, **alone)
    return replace(config, context=context, evaluation=evaluation, run=replace(config.run, dir=str(folder)))


def test_losses_of_depths_are_those_of_one_rank(trained: Trained, tmp_path: Path) -> None:
    config, losses = trained
    assert close(run(alone(config, tmp_path / "run"), 1), losses)
    assert all(len(losses[key]) == 3 and losses[key][-1] < losses[key][0] for key in COLUMNS[:3])


def test_what_a_run_says_of_its_depths(trained: Trained) -> None:
    config, losses = trained
    folder = RunFolder.read(config.run.dir)
    assert folder.facts is not None
    lines = dict(folder.facts.lines)
    assert lines["mtp"].startswith("2 depths of multi-token prediction, loss weight 0.5")
    assert "no MFU" not in lines and (folder.train["tflops"] > 0).all()
    assert folder.train["mtp_loss_2"].tolist() == losses["mtp_loss_2"]
    page = write_report(folder.path).read_text(encoding="utf-8")
    assert "Multi-token prediction" in page and "depth 2" in page
    assert "num_layers = 2" in to_toml(config)


@pytest.mark.parametrize("home", [pytest.param("tp", marks=pytest.mark.whole), "pp"])
def test_a_run_goes_on_at_another_home(trained: Trained, home: str, tmp_path: Path) -> None:
    config, losses = trained
    other = gone_on_from_the_first_checkpoint(config, tmp_path / "run", ParallelConfig(**{home: 2}))
    assert close(run(alone(other, tmp_path / "run"), 2), losses)


def test_depths_are_fixed_where_a_run_goes_on(trained: Trained) -> None:
    config, _ = trained
    other = replace(config, mtp=replace(config.mtp, num_layers=1), train=replace(config.train, steps=4))
    with pytest.raises(ConfigError, match=r"mtp.num_layers was 2 when .* and is 1 now"):
        run(alone(other, Path(config.run.dir)), 1)


def test_exports_have_the_depths(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = trained
    saved = load_file(Path(config.run.dir) / "model" / "model.safetensors")
    assert export_main([config.run.dir, str(tmp_path / "with")]) == 0
    assert "2 depths of multi-token prediction: under mtp.layers.0" in capsys.readouterr().out
    whole = load_file(tmp_path / "with" / "model.safetensors")
    assert whole.keys() == saved.keys() and all(torch.equal(whole[name], saved[name]) for name in saved)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "with", dtype=torch.float64)
    assert all(torch.equal(x, saved[name]) for name, x in stock.named_parameters())
    with pytest.warns(UserWarning, match="30 tensors of its files are no part of .* mtp.layers.0.eh_proj.weight"):
        model = load_model(tmp_path / "with", dtype="float64", sharded=False)
    read = add_mtp(model, 2, weights=tmp_path / "with")
    assert all(torch.equal(x, saved[name]) for name, x in read.named_parameters())


def test_a_saved_run_is_evaluated_without_its_depths(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    config, losses = trained
    flags = ["--world", "1", "--evaluation.context_parallel_size", "1", "--model.dtype", "float64", "--json"]
    assert eval_main([config.run.dir, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(losses["eval_loss"][-1], rel=1e-12)


@pytest.mark.filterwarnings("ignore:.*are no part of the")  # the depths, which are added then
def test_depths_of_a_folder_are_trained_on(trained: Trained, tmp_path: Path) -> None:
    config, _ = trained
    keys: dict[str, Any] = {**KEYS, "model__path": config.run.dir + "/model", "optimizer__lr": 1e-3, "train__steps": 1}
    read = run(alone(small_config(tmp_path, **keys), tmp_path / "read"), 1)
    drawn = run(alone(small_config(tmp_path, **keys, mtp__weights="random"), tmp_path / "drawn"), 1)
    assert drawn["loss"] == read["loss"] and all(drawn[key][0] > read[key][0] + 0.1 for key in COLUMNS[1:3])
    with pytest.raises(
        ModelError, match=r"mtp.num_layers is 3, .* weights of 2 depths .*mtp.num_layers = 2, or mtp.weights"
    ):
        run(alone(small_config(tmp_path, **{**keys, "mtp__num_layers": 3}), tmp_path / "more"), 1)

"""Runs of other models than tiny presets: random weights of a configuration, scaled positions, resumed unread."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from longspan.cli.main import main
from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import train_tokenizer
from longspan.errors import ConfigError, DataError, ModelError
from longspan.model.weights.fill import RandomWeights
from longspan.model.weights.folder import FolderWeights
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from tests.model.deep import deep_config
from tests.train.small import small_config, train_rank, without_times

LONG = {"data__max_document_tokens": 0, "context__max_tokens_per_slot": 0, "context__eval_max_tokens_per_slot": 0}


def _architecture(folder: Path, **more: object) -> Path:
    """A folder with a configuration and nothing else: experts that two ranks share, 32 positions, 300 rows."""
    config = deep_config("qwen3-moe", layers=4, vocabulary=300)
    config.update({"max_position_embeddings": 32, "dtype": "bfloat16", **more})
    config.save_pretrained(folder)
    return folder


def _losses(config: RunConfig, ranks: int) -> list[dict[str, object]]:
    run_ranks(train_rank, ranks, config, ranks, timeout=90)
    return [without_times(row) for row in read_metrics(Path(config.run.dir) / "metrics.jsonl")]


def test_a_configuration_is_drawn_scaled_trained_and_saved(tmp_path: Path) -> None:
    model = {"model__config": str(_architecture(tmp_path / "model")), "model__rope_scaling": "yarn"}
    alone = small_config(
        tmp_path / "alone", **model, **LONG, train__steps=2, context__context_parallel_size=1, data__eval_documents=0
    )
    homes = {"pp": {"parallel__pp": 2}, "ep": {"parallel__ep": 2}}
    wanted = [row["loss"] for row in _losses(alone, 1)]
    for name, axes in homes.items():
        keys = {**LONG, **model, **axes, "train__steps": 2, "data__eval_documents": 0}
        keys["context__context_parallel_size"] = 1 + (name == "ep")
        config = small_config(tmp_path / name, **keys)
        assert [row["loss"] for row in _losses(config, 2)] == pytest.approx(wanted, rel=1e-5), name
    saved = AutoModelForCausalLM.from_pretrained(Path(alone.run.dir) / "model", dtype="auto")
    assert saved.config.rope_parameters["rope_type"] == "yarn" and saved.config.rope_parameters["factor"] > 1
    assert saved.config.rope_parameters["original_max_position_embeddings"] == 32


def test_documents_beyond_the_positions_are_refused_before_the_first_step(tmp_path: Path) -> None:
    config = small_config(tmp_path, model__config=str(_architecture(tmp_path / "model")))
    says = (
        r"longest document has 64 tokens \(file\d\d.py\), and the model knows 32 positions .*max_document_tokens = 32"
    )
    with pytest.raises(ConfigError, match=says):
        run_ranks(train_rank, 2, config, 2)
    assert not (Path(config.run.dir) / "metrics.jsonl").exists()


def _without_reading(rank: int, config: RunConfig, ranks: int) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read or drawn, and a checkpoint has them")

    FolderWeights.read = RandomWeights.read = refuse  # pyright: ignore[reportAttributeAccessIssue]
    train_rank(rank, config, ranks)


@pytest.mark.whole
def test_a_resumed_run_reads_no_weights_but_its_checkpoint(tmp_path: Path) -> None:
    """Weights are NaN until the checkpoint is loaded, so one that it lacked would end the run."""
    source = _architecture(tmp_path / "model", max_position_embeddings=64)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(source)
    train_tokenizer(["some text"], 300).save_pretrained(source)
    straight = small_config(tmp_path, model__path=str(source), train__save_every=2, train__steps=4)
    rows = _losses(straight, 2)
    again = replace(straight, run=replace(straight.run, dir=str(shutil.copytree(straight.run.dir, tmp_path / "again"))))
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-000004")
    for file in source.glob("*.safetensors"):
        file.unlink()
    run_ranks(_without_reading, 2, again, 2, timeout=90)
    assert [without_times(row) for row in read_metrics(tmp_path / "again" / "metrics.jsonl")] == rows
    old, new = (
        load_file(folder / "model" / "model.safetensors") for folder in (Path(straight.run.dir), tmp_path / "again")
    )
    assert old.keys() == new.keys() and all(old[name].equal(new[name]) for name in old)


def _folder(path: Path, rows: int = 300) -> Path:
    """A folder with weights and without a tokenizer."""
    model = AutoModelForCausalLM.from_config(deep_config("qwen3", layers=4, vocabulary=rows), dtype="bfloat16")
    model.save_pretrained(path)
    return path


def test_weights_are_not_trained_on_the_ids_of_another_tokenizer(tmp_path: Path) -> None:
    config = small_config(tmp_path, model__path=str(_folder(tmp_path / "model")))
    with pytest.raises(DataError, match=r"has no tokenizer.json, and its weights know .* name .* with data.tokenizer"):
        run_ranks(train_rank, 2, config, 2)
    train_tokenizer(["some text"], 280).save_pretrained(tmp_path / "model")
    small = small_config(tmp_path, model__path=str(_folder(tmp_path / "model", rows=250)))
    with pytest.raises(DataError, match=r"tokenizer .*/model has ids up to 26\d, the embedding of .* has 250 rows"):
        run_ranks(train_rank, 2, small, 2)
    assert not (Path(config.run.dir) / "corpus").exists()


def test_weights_of_another_model_are_refused_before_texts_are_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, folder / "model.safetensors")
    config = small_config(tmp_path, model__path=str(folder))
    with pytest.raises(ModelError, match=r"hold 1 tensor that a Qwen3ForCausalLM .* does not take: .*weight_scale"):
        run_ranks(train_rank, 2, config, 2)
    assert not (Path(config.run.dir) / "corpus").exists()
    assert main(["eval", str(folder), "--data", f"words={tmp_path}", "--world", "1", "--device", "cpu"]) == 2
    assert "does not take: model.layers.0.mlp.up_proj.weight_scale" in capfd.readouterr().err


def test_a_preset_that_is_meant_is_the_preset_that_is_named(tmp_path: Path) -> None:
    alone = {"context__context_parallel_size": 1, "context__eval_context_parallel_size": 1}
    config = small_config(tmp_path, train__steps=1, **alone)
    assert config.model.preset == "qwen3-tiny"
    rows = _losses(config, 1)
    assert _losses(replace(config, model=replace(config.model, preset="")), 1) == rows

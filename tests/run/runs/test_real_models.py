"""Runs of models that are no preset: drawn from a configuration, and refused with their data."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from longspan.cli.main import main
from longspan.corpus.tokenizer import train_tokenizer
from longspan.errors import ConfigError, DataError, LongspanError, ModelError
from longspan.run import set_up
from tests.model.deep import deep_config
from tests.model.vision.models import tiny
from tests.run.runs.homes import ALONE, refusals, train_rows
from tests.train.small import small_config

LONG = {"data__max_document_tokens": 0, "context__max_tokens_per_slot": 0, "evaluation__max_tokens_per_slot": 0}


def _architecture(folder: Path) -> Path:
    """A folder with a configuration and nothing else: experts that two ranks share, 32 positions, 300 rows."""
    config = deep_config("qwen3-moe", layers=2, vocabulary=300)
    config.update({"max_position_embeddings": 32, "dtype": "bfloat16"})
    config.save_pretrained(folder)
    return folder


def test_a_configuration_is_drawn_scaled_trained_and_saved(tmp_path: Path) -> None:
    model = {"model__config": str(_architecture(tmp_path / "model")), "model__rope_scaling": "yarn"}
    keys = {**model, **LONG, "train__steps": 2, "evaluation__every": 0, "evaluation__documents": 0}
    alone = small_config(tmp_path / "alone", **ALONE | keys)
    wanted = [row["loss"] for row in train_rows(alone, 1)]
    home = small_config(tmp_path / "home", **keys, parallel__ep=2)
    assert [row["loss"] for row in train_rows(home, 2)] == pytest.approx(wanted, rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(Path(alone.run.dir) / "model", dtype="auto")
    assert saved.config.rope_parameters["rope_type"] == "yarn" and saved.config.rope_parameters["factor"] > 1
    assert saved.config.rope_parameters["original_max_position_embeddings"] == 32


def _folder(path: Path, rows: int = 300) -> Path:
    model = AutoModelForCausalLM.from_config(deep_config("qwen3", layers=2, vocabulary=rows), dtype="bfloat16")
    model.save_pretrained(path)
    return path


def _quantized(folder: Path) -> Path:
    config = json.loads((_folder(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    return folder


def _scores(folder: Path) -> Path:
    config = deep_config("qwen3", layers=2, vocabulary=300)
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def _cross_attention(folder: Path) -> Path:
    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=300, add_cross_attention=True).save_pretrained(folder)
    return folder


def _sees_images(folder: Path, **keys: Any) -> Path:
    config = tiny("qwen2.5-vl").config
    config.update(keys)
    config.save_pretrained(folder)
    return folder


def _tuples(folder: Path) -> Path:
    config = deep_config("qwen3", layers=2, vocabulary=300)
    config.return_dict = False
    config.save_pretrained(folder)
    return folder


LORA = {"lora__rank": 4, "optimizer__lr": 1e-3}
WITHOUT_DATA: list[tuple[dict[str, Any], type[LongspanError], str]] = [
    (
        LORA | {"lora__target_modules": ["q_prj"]},
        ModelError,
        "'q_prj', which is no linear of Qwen3For.*; did you mean 'q_proj'",
    ),
    (
        LORA | {"model__path": _folder, "lora__target_modules": ["embed_tokens"]},
        ModelError,
        "'embed_tokens', which is no linear",
    ),
    ({"mtp__num_layers": 1, "mtp__weights": _folder}, ModelError, "has weights of 0 depths of multi-token"),
    ({"model__path": _quantized}, ModelError, r"is quantized \(gptq"),
    ({"model__path": _scores, "model__num_labels": 3}, ModelError, "of 2 scores, and model.num_labels is 3"),
    ({"model__config": _cross_attention}, ModelError, "add_cross_attention is set"),
    ({"model__config": _cross_attention, "model__num_labels": 1}, ModelError, "add_cross_attention is set"),
    ({"model__config": _tuples, "mtp__num_layers": 1}, ModelError, "return_dict is False"),
    ({"model__config": partial(_sees_images, return_dict=False)}, ModelError, "return_dict is False"),
    (
        LORA | {"model__config": _sees_images, "lora__target_modules": ["layers.0.self_attn.q_prj"]},
        ModelError,
        "'layers.0.self_attn.q_prj', which is no linear of Qwen2_5_VL.*; did you mean 'q_proj'",
    ),
    ({"encoder__max_tokens": 64}, ModelError, "Qwen3Config stands for no model from images and text to text"),
    ({"context__cp_comm_type": ["p2p"] * 5}, ConfigError, "context.cp_comm_type lists 5 types, the model has"),
    ({"context__cp_comm_type": ["p2p"] * 3}, ConfigError, "context.cp_comm_type lists 3 types, the model has 2 layers"),
]


@pytest.mark.parametrize("number", range(len(WITHOUT_DATA)))
def test_what_the_model_decides_is_refused_before_data_are_read(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, kind, message = WITHOUT_DATA[number]
    made = {key: str(value(tmp_path / "model")) if callable(value) else value for key, value in keys.items()}
    monkeypatch.setattr(set_up, "open_data", lambda *_: pytest.fail("data were read"))
    with pytest.raises(kind, match=message):
        train_rows(small_config(tmp_path, **ALONE | {"optimizer__lr": 1e-3} | made), 1)


def test_what_does_not_fit_is_refused_before_texts_are_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bare, more, small = _folder(tmp_path / "bare"), _folder(tmp_path / "more"), _folder(tmp_path / "small", 250)
    train_tokenizer(["some text"], 280).save_pretrained(small)
    weights = load_file(more / "model.safetensors")
    save_file(weights | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, more / "model.safetensors")
    positions = (
        r"longest document has 64 tokens \(file\d\d.py\), and the model knows 32 positions .*max_document_tokens = 32"
    )
    target = r"'q_prj', which is no linear of Qwen3ForCausalLM .*; did you mean 'q_proj'"
    cases: list[tuple[dict[str, Any], type[LongspanError], str]] = [
        (
            {"model__path": str(bare)},
            DataError,
            r"has no tokenizer.json, and its weights know .* name .* with data.tokenizer",
        ),
        ({"model__path": str(small)}, DataError, r"tokenizer .*/small has ids up to 26\d, .* has 250 rows"),
        ({"model__path": str(more)}, ModelError, r"hold 1 tensor that a Qwen3ForCausalLM .* take: .*weight_scale"),
        ({"lora__rank": 4, "lora__target_modules": ["q_prj"]}, ModelError, target),
        ({"model__config": str(_architecture(tmp_path / "model"))}, ConfigError, positions),
    ]
    configs = [small_config(tmp_path / str(number), **keys) for number, (keys, *_) in enumerate(cases)]
    for error, config, (_, kind, message) in zip(refusals(configs), configs, cases, strict=True):
        assert type(error) is kind and re.search(message, str(error)), (message, error)
        assert not (Path(config.run.dir) / "corpus").exists() or kind is ConfigError
        assert not (Path(config.run.dir) / "metrics.jsonl").exists()
    assert main(["eval", str(more), "--data", f"words={tmp_path}", "--world", "1", "--device", "cpu"]) == 2
    assert "does not take: model.layers.0.mlp.up_proj.weight_scale" in capfd.readouterr().err

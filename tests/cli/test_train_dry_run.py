"""`longspan train --dry-run`: what a configuration and its data would hold and take, without a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import machine, processes
from longspan.cli.main import main
from longspan.cli.plans import question
from longspan.cli.plans.fit import can_scale, position_limit
from longspan.config.defaults import compute_dtype
from longspan.config.file import load_config
from longspan.model.seams import rope
from longspan.train.plans.run_cost import run_memory_settings
from tests.run.runs.test_images_run import model_folder, rows_with_images

CONFIG = """
[model]
config = "{folder}"
[data]
path = "{folder}/texts"
vocab_size = 300
cache = "{folder}/cache"
max_document_tokens = 4000
[context]
context_parallel_size = 2
[train]
lr = 1e-4
tokens_per_step = 8000
epochs = 2
[run]
dir = "{folder}/run"
"""
MODEL: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MODEL |= {"intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 16384}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document {i} " * (200 + 100 * i))
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path))
    return str(tmp_path / "run.toml")


def test_it_tells_what_the_run_would_take_and_makes_none(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", config, "--dry-run", "--world", "4", "--run.machine", "h100"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] and answer["gpus"] == 4 and answer["gpu_bytes"] == 80 << 30 and answer["steps"] > 1
    assert answer["keys"]["context.context_parallel_size"] == 2 and answer["keys"]["context.max_tokens_per_slot"] > 0
    assert [degree["degree"] for degree in answer["degrees"]] == [2]
    assert not (tmp_path / "run").exists()
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"\nmax_tokens_per_slot = {answer['keys']['context.max_tokens_per_slot']}\n" in text
    assert f"{answer['steps']} steps of " in text
    assert "MiB of one GPU" in text and re.search(r"fits: (\S+) tokens\nthe model knows \S+ positions.* than \1", text)
    assert main([*words, "--context.max_tokens_per_slot", "3000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"]["context.max_tokens_per_slot"] == 3000


def test_what_the_run_refuses_is_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", config, "--dry-run", "--world", "4"]
    much = "(no number of such GPUs|GPUs would do).* does not fit 4 H200s: at least "
    for more, message in (
        (["--train.memory_bytes", "1200000000"], much),
        (["--context.context_parallel_size", "3"], "context_parallel_size 3 does not divide 4 slots"),
        (["--data.path", "nowhere"], "data.path 'nowhere' does not exist"),
        (["--run.machine", "h300"], "h300"),
    ):
        assert main([*words, *more]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert main([*words, "--train.memory_bytes", "1200000000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_a_gpu_that_is_here_has_its_own_bytes(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "usable_gpus", lambda: 2)
    monkeypatch.setattr(question, "find_first_gpu", lambda: ("NVIDIA A100-SXM4-40GB", 42_000_000_000))
    monkeypatch.setattr(question, "free_host_bytes", lambda: 100_000_000_000)
    assert main(["train", config, "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["gpus"], answer["gpu_bytes"], answer["gpu"]) == (2, 42_000_000_000, "NVIDIA A100-SXM4-40GB")
    assert answer["host_bytes"] == int(0.85 * 50_000_000_000) and answer["assumed"] == []
    assert main(["train", config, "--dry-run", "--json", "--device", "cpu", "--world", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpu"] == "H200" and "no GPU here" in answer["assumed"][0]
    here = machine.find_first_gpu()
    assert here is None or here[1] > 0


KEYS: list[dict[str, Any]] = [
    {},
    {"model.dtype": "bfloat16", "lora.rank": 8, "lora.targets": ["q_proj"]},
    {"model.dtype": "float64", "train.optimizer": "sgd", "train.fused_norms": "off"},
    {"model.compute_dtype": "float32", "encoder.train": "projector", "encoder.recompute": True},
]


@pytest.mark.parametrize("keys", KEYS)
def test_settings_without_torch_are_those_with_it(keys: dict[str, Any]) -> None:
    config = load_config(None, keys)
    for gpu, kind in ((True, "cuda"), (False, "cpu")):
        assert run_memory_settings(config, gpu=gpu).compute_bytes == compute_dtype(config.model, kind).itemsize


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3Config", {"max_position_embeddings": 40960}),
    ("Qwen3Config", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 4096}),
    ("LlamaConfig", {"max_position_embeddings": 131072, "rope_scaling": None}),
    ("Gemma3TextConfig", {"max_position_embeddings": 131072}),
    ("Qwen3VLConfig", {}),
    ("BambaConfig", {}),
    ("NemotronHConfig", {}),
    ("GraniteMoeHybridConfig", {"position_embedding_type": "nope"}),
    ("Qwen3NextConfig", {}),
]


@pytest.mark.parametrize(("name", "values"), FAMILIES)
def test_positions_are_those_that_training_knows(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**values)
    config.save_pretrained(tmp_path)
    assert position_limit(str(tmp_path)) == rope.position_limit(config)
    try:
        rope.scale_rope(config, "yarn", 2.0)
    except Exception:
        assert not can_scale(str(tmp_path))
    else:
        assert can_scale(str(tmp_path))


def test_images_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    rows, folder = rows_with_images(tmp_path), tmp_path / "model"
    folder.mkdir()
    model_folder(folder)
    words = ["plan", "--model", str(folder), "--data", str(rows), "--gpu", "h200", "--tokens-per-step", "400", "--json"]
    assert main([*words, "--epochs", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert any(re.match(r"images: \d+ rows in a step, encoded in .* s of these", note) for note in answer["notes"])
    assert main([*words, "--data.pack_to", "200"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert "not in the seconds of packs" in packed["notes"][0]

"""Models from folders and presets: what a folder lacks is named, and random weights depend on the seed alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longspan.errors import ModelError
from longspan.model import load_model
from tests.model.stock import VOCABULARY, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    tiny("qwen3").save_pretrained(path, max_shard_size="20KB")
    return path


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_folder_gives_its_weights(folder: Path, dtype: str) -> None:
    model = load_model(folder, dtype=dtype, vocab_size=VOCABULARY)
    wanted = tiny("qwen3").to(getattr(torch, dtype))
    for (name, found), (_, expected) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _config(edit: Callable[[dict], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        edit(config)
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def _without_a_weight(folder: Path) -> None:
    file = next(path for path in sorted(folder.glob("*.safetensors")) if "model.norm.weight" in load_file(path))
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights or {"other": torch.zeros(1)}, file, metadata={"format": "pt"})


def _cut(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGED = {
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken configuration": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded: .*config"),
    "unknown architecture": (_config(lambda c: c.update(model_type="nope")), "cannot be loaded: .*nope"),
    "no weights": (lambda f: [path.unlink() for path in f.glob("model*")], "has no weights"),
    "a file missing": (lambda f: min(f.glob("*.safetensors")).unlink(), r"lacks 1 of \d+ weight files: model-00001"),
    "broken index": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
    "a file cut short": (_cut, "cannot be loaded"),
    "a weight missing": (_without_a_weight, "lacks 1 weights .*model.norm.weight"),
    "another size": (_config(lambda c: c.update(intermediate_size=64)), "cannot be loaded"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folders(folder: Path, tmp_path: Path, case: str) -> None:
    damage, says = DAMAGED[case]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    with pytest.raises(ModelError, match=says) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_wrong_requests(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model folder .*/none"):
        load_model(tmp_path / "none")
    with pytest.raises(ModelError, match=r"the tokenizer has 62 ids, the model in .* only 61"):
        load_model(folder, vocab_size=62)
    with pytest.raises(ModelError, match="give a folder, or a preset: llama-tiny, qwen3-tiny"):
        load_model()
    with pytest.raises(ModelError, match="unknown dtype 'float31'"):
        load_model(folder, dtype="float31")
    with pytest.raises(ModelError, match="needs vocab_size"):
        load_model(preset="qwen3-tiny")


@pytest.mark.parametrize("preset", ["qwen3-tiny", "llama-tiny"])
def test_random_weights_depend_on_the_seed_alone(preset: str) -> None:
    torch.manual_seed(11)
    first = load_model(preset=preset, vocab_size=100, seed=3)
    state = torch.get_rng_state()
    torch.manual_seed(12)
    again = load_model(preset=preset, vocab_size=100, seed=3, dtype="float64")
    other = load_model(preset=preset, vocab_size=100, seed=4)
    torch.manual_seed(11)
    assert torch.equal(state, torch.get_rng_state()), "drawing weights moved the caller's random state"
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert b.dtype == torch.float64 and torch.equal(a.double(), b)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)

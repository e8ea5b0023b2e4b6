"""Models from folders and presets: what a folder lacks is named, and random weights depend on the seed alone."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config

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
    "a file cut short": (_cut, "cannot be read, perhaps it was cut short"),
    "a weight missing": (_without_a_weight, "lacks 1 weights .*model.norm.weight"),
    "another size": (_config(lambda c: c.update(intermediate_size=64)), r"do not fit its config.json: .*(48|64)"),
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


CODE = "from pathlib import Path\nPath(__file__ + '.ran').touch()\n"
AUTO_MAP = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}


class _Runs:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def _refusal_of(folder: Path, **keys: Any) -> str:
    """What `load_model` says of a folder, whole and in parts, without a question on stdin and without its code run."""
    with pytest.raises(ModelError) as whole:
        load_model(folder, **keys)
    with pytest.raises(ModelError) as parts:
        load_model(folder, sharded=True, **keys)
    assert str(whole.value) == str(parts.value) and not list(folder.parent.rglob("*.ran"))
    assert not re.search("trust_remote_code|weights_only|\n", str(whole.value))
    return str(whole.value)


@pytest.fixture
def copied(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder with code in it, for whoever runs it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    (copy / "own.py").write_text(CODE)
    return copy


def test_no_code_of_a_folder_is_run(copied: Path) -> None:
    _config(lambda c: c.update(auto_map=AUTO_MAP))(copied)
    assert type(load_model(copied)).__name__ == "Qwen3ForCausalLM"  # the class that transformers has for its kind
    model = load_model(copied, sharded=True)
    assert not hasattr(model.config, "auto_map") and not list(copied.glob("*.ran"))
    for kind in ("own", "bert_of_nobody"):
        _config(lambda c, kind=kind: c.update(model_type=kind))(copied)
        assert "its auto_map names Python code of its own, and no code of a folder is run" in _refusal_of(copied)
        with pytest.raises(ModelError, match="no code of a folder is run; use a folder in transformers' own format"):
            load_model(config=copied)


def test_no_kernel_of_the_hub_is_loaded(copied: Path) -> None:
    _config(lambda c: c.update(attn_implementation="nobody/kernel", _experts_implementation="nobody/kernel"))(copied)
    for sharded in (False, True):
        assert load_model(copied, sharded=sharded).config._attn_implementation == "sdpa"
    assert load_model(config=copied).config._attn_implementation == "sdpa"


def test_a_pickle_is_not_run(copied: Path) -> None:
    for file in copied.glob("*safetensors*"):
        file.unlink()
    torch.save({"model.norm.weight": _Runs(copied / "pickle.ran")}, copied / "pytorch_model.bin")
    assert "its weights are a pickle with more than tensors in it" in _refusal_of(copied)


@pytest.mark.parametrize("name", ["../outside/{}", "a/../../outside/{}", "{outside}/{}"])
def test_an_index_names_no_file_outside_its_folder(copied: Path, name: str) -> None:
    outside = copied.parent / "outside"
    outside.mkdir()
    index = copied / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    for file in {*weights.values()}:
        (copied / file).rename(outside / file)
    named = {key: name.format(file, outside=outside) for key, file in weights.items()}
    index.write_text(json.dumps({"weight_map": named}))
    assert "files outside its folder" in _refusal_of(copied)


def test_links_of_a_cache_are_read(copied: Path) -> None:
    """As the hub's cache has them: snapshots/X/config.json -> ../../blobs/1."""
    blobs, snapshot = copied.parent / "blobs", copied.parent / "snapshots" / "x"
    copied.rename(blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    for sharded in (False, True):
        assert type(load_model(snapshot, sharded=sharded)).__name__ == "Qwen3ForCausalLM"


def test_an_adapter_beside_a_model_is_refused(copied: Path) -> None:
    """Transformers would load what the adapter names as its base, and no file of the folder's weights."""
    (copied / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(copied)}))
    assert "holds a model and an adapter of peft" in _refusal_of(copied)


def test_a_configuration_of_no_causal_model_is_refused(tmp_path: Path) -> None:
    T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path)
    for sharded in (False, True):
        with pytest.raises(ModelError, match=r"no model can be made of the T5Config of .*config.json: ValueError"):
            load_model(config=tmp_path, sharded=sharded)


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

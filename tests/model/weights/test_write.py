"""What a saved model takes the place of in its folder, and what stays; interrupted at any file nothing is lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from longspan import Layout, World, load_model, prepare, save_model
from longspan.errors import ModelError
from longspan.model.lora import NewAdapter, add_lora
from longspan.model.weights.write import OF_MODEL, make_partial_folder, replace_files

OTHERS = {"README.md": "mine", "chat_template.jinja": "mine", "model-notes.txt": "mine", "step-1/config.json": "{}"}
OLD = {"config.json": "{}", "model.safetensors.index.json": "{}", "generation_config.json": "{}"}
OLD |= {f"model-0000{i}-of-00002.safetensors": "old" for i in (1, 2)}
ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": "old"}
NEW = {"config.json", "generation_config.json", "model.safetensors"}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(Layout(1), backend="gloo") as opened:
        yield opened


def model_on(world: World, *, rank: int = 0) -> Any:
    model: Any = load_model(preset="qwen3-tiny", vocab_size=300)
    return prepare(add_lora(model, NewAdapter(rank=rank)) if rank else model, world, probe=False)


def test_a_model_replaces_an_older_one_and_nothing_else(tmp_path: Path, world: World) -> None:
    folder, model = write_files(tmp_path / "model", OTHERS | OLD | ADAPTER), model_on(world)
    save_model(model, folder, world)
    assert files_of(folder) == {*OTHERS, *NEW} and [path.name for path in tmp_path.iterdir()] == ["model"]
    assert all((folder / name).read_text() == text for name, text in OTHERS.items())
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert all(p.equal(model.get_parameter(name).full_tensor()) for name, p in stock.named_parameters())


def test_checkpoints_of_a_trainer_stay(tmp_path: Path, world: World) -> None:
    files = {"checkpoint-4/config.json": "{}", "checkpoint-4/model.safetensors": "its own", "training_args.bin": "mine"}
    files |= {"checkpoint-4/trainer_state.json": "{}", "runs/events.out": "mine"}
    folder, model = write_files(tmp_path / "out", files), model_on(world)
    for _ in range(2):  # the second replaces the first
        save_model(model, str(folder), world)
        assert files_of(folder) == {*files, *NEW}
        assert all((folder / name).read_text() == text for name, text in files.items())


def test_a_tokenizer_replaces_all_of_an_older_one(tmp_path: Path, world: World) -> None:
    folder = write_files(tmp_path / "model", {"README.md": "mine", "vocab.json": "{}", "chat_template.jinja": "old"})
    save_model(model_on(world), folder, world, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())))
    assert files_of(folder) == {"README.md", *NEW, "tokenizer.json", "tokenizer_config.json"}


def test_an_adapter_leaves_the_model_beside_it(tmp_path: Path, world: World) -> None:
    pytest.importorskip("peft")
    folder = write_files(tmp_path / "model", OTHERS | OLD | ADAPTER | {"adapter_model.bin": "old"})
    save_model(model_on(world, rank=2), folder, world)
    assert files_of(folder) == {*OTHERS, *OLD, *ADAPTER}
    assert (folder / "adapter_model.safetensors").stat().st_size > 100
    assert (folder / "model-00001-of-00002.safetensors").read_text() == "old"


def test_a_file_is_not_replaced_and_a_link_is_followed(tmp_path: Path, world: World) -> None:
    (tmp_path / "weights.pt").write_text("mine")
    with pytest.raises(ModelError, match=r"weights.pt is a file; name a folder to write the model to"):
        save_model(model_on(world), tmp_path / "weights.pt", world)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    save_model(model_on(world), tmp_path / "link", world)
    assert (tmp_path / "link").is_symlink() and files_of(tmp_path / "elsewhere") == NEW
    assert (tmp_path / "weights.pt").read_text() == "mine"


@pytest.mark.parametrize("stop", range(12))
def test_nothing_is_lost_or_mixed_where_a_save_is_interrupted(
    tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file is the last to move, a folder with a configuration holds one model's files alone."""
    folder = write_files(tmp_path / "model", OTHERS | OLD)
    write_files(tmp_path / "model.old", {"notes": "mine"})
    new = dict.fromkeys([*OLD, "model.safetensors"], "new")
    partial, moves, rename = write_files(make_partial_folder(folder), new), iter(range(99)), Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if next(moves) == stop:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    try:
        replace_files(partial, folder, OF_MODEL)
        assert next(moves) <= stop
    except KeyboardInterrupt:
        pass
    of_models = [(folder / name).read_text() == "new" for name in {*OLD, *new} if (folder / name).is_file()]
    assert (
        not (folder / "config.json").is_file() or all(of_models) or (not any(of_models) and len(of_models) == len(OLD))
    )
    everywhere = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert everywhere.count("new") == len(new)
    assert all(of_models) or len(everywhere) == len(OTHERS) + len(OLD) + len(new) + 1
    assert (tmp_path / "model.old" / "notes").read_text() == "mine"

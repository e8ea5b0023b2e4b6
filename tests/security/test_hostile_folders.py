"""Folders of someone else, of models and of runs, through the verbs that read them: nothing in them is run or asked."""

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longspan.checkpoint.files import write_damage_notes
from longspan.cli.main import main
from longspan.config.file import load_config
from longspan.errors import ModelError, RunFolderError
from longspan.launch.output import _Output
from longspan.model.weights.hf_folder import read_generation_settings
from tests.run.runs.homes import ALONE
from tests.train.small import small_config, train_rank, write_model

SOURCE = Path(__file__).parents[2] / "src" / "longspan"
CODE = "from pathlib import Path\nPath(__file__ + '.ran').touch()\nclass Own: ...\n"
AUTO_MAP = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
READS = ("from_pretrained", "from_config", "get_class_from_dynamic_module")
ADVICE = ("trust_remote_code", "weights_only", "y/N")


def test_every_read_of_transformers_trusts_no_code() -> None:
    calls = list[str]()
    texts = ((file, file.read_text(encoding="utf-8")) for file in SOURCE.rglob("*.py"))
    for file, text in (pair for pair in texts if any(name in pair[1] for name in READS)):
        for node in ast.walk(ast.parse(text)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not is_call or node.func.attr not in READS:
                continue
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            calls.append(f"{file.name}: {ast.unparse(node.func.value)}")
            if said.get("trust_remote_code") != "False" and said.get(None) != "FOLDER_OPTIONS":
                # settings alone, which name no code
                place = ast.unparse(node.func.value), file.name, said.get("local_files_only")
                assert place == ("GenerationConfig", "hf_folder.py", "True"), f"{file}: {ast.unparse(node)}"
    assert len(calls) >= 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    write_model(root)
    keys = {"model__path": str(root / "model"), "train__steps": 1, "checkpoint__every": 1, "evaluation__every": 0}
    train_rank(0, small_config(root, **keys, evaluation__documents=0, **ALONE), 1)
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these folders, where questions fail, and modules of the working folder can be imported."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    monkeypatch.setattr("sys.stdin", None)
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    monkeypatch.chdir(copy)
    monkeypatch.syspath_prepend(copy)
    return copy


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_code(folder: Path) -> None:
    (folder / "own.py").write_text(CODE)
    edit_json(folder / "config.json", auto_map=AUTO_MAP, model_type="own_of_nobody")
    edit_json(folder / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Own")


EVAL = ["eval", "model", "--data", "words=texts", "--world", "1", "--device", "cpu"]
TRAIN = ["train", "--model.path", "model", "--data.path", "texts", "--world", "1", "--device", "cpu"]
TRAIN += ["--run.dir", "new", "--optimizer.lr", "1e-5", "--train.steps", "1"]


def refused(words: list[str], place: Path, capfd: pytest.CaptureFixture[str], message: str) -> None:
    assert main(words) == 2
    error = capfd.readouterr().err
    assert message in error and not any(word in error for word in ADVICE), error
    assert not list(place.rglob("*.ran"))


def test_a_hostile_model_is_refused_by_verbs(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What else may be wrong with a folder is refused where it is read: tests/model/weights."""
    with_code(place / "model")
    for words in (EVAL, TRAIN, ["doctor", "--model", "model"]):
        refused(words, place, capfd, "no code of a folder is run")
    assert main(["plan", "--same", "2x64", "--slots", "2", "--model", "model"]) in (0, 2)
    assert not list(place.rglob("*.ran"))


def test_export_and_report_import_nothing_that_a_run_names(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "hostile_part.py").write_text("raise SystemExit('imported')")
    file = place / "run" / "config.toml"
    names = {"optimizer": '"hostile_part.Sgd"', "planner": '"hostile_part.plan"', "loggers": '["hostile_part.Log"]'}
    text = re.sub(r"^(loggers) = .*\n", "", file.read_text(), flags=re.M).replace("[run]\n", "[run]\nloggers = 0\n")
    text = re.sub(r"^(optimizer|planner|loggers) = .*", lambda m: f"{m[1]} = {names[m[1]]}", text, flags=re.M)
    file.write_text(text)
    assert text.count("hostile_part") >= 3
    assert main(["export", "run", "out"]) == 0 and (place / "out" / "model.safetensors").is_file()
    assert main(["report", "run"]) == 0 and "hostile_part.Log" in (place / "run" / "report.html").read_text()
    assert "hostile_part" not in sys.modules
    capfd.readouterr()


DAMAGED = {
    "tokenizer.json": b'{"version": "1.0", "trunc',
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrai',
    "special_tokens_map.json": b"[]",
    "preprocessor_config.json": b"{",
    "chat_template.jinja": b"{% for m in messages %}{{ m.cont",
    "additional_chat_templates/tool.jinja": b"\xff",
    "generation_config.json": b"\0" * 64,
}


def test_damaged_files_of_a_tokenizer_are_not_exported(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, data in DAMAGED.items():
        file = place / "run" / name
        old = file.read_bytes() if file.is_file() else None
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
        refused(["export", "run", "out"], place, capfd, str(Path("run", name)))
        assert not (place / "out").exists()
        file.unlink() if old is None else file.write_bytes(old)
    configuration = place / "run" / "config.json"
    for values in (
        {"architectures": 7},
        {"dtype": -1},
        {"head_dim": 0},
        {"hidden_act": "x"},
        {"num_key_value_heads": -1},
    ):
        old = configuration.read_bytes()
        edit_json(configuration, **values)
        refused(["export", "run", "out"], place, capfd, "run/config.json")
        configuration.write_bytes(old)
    settings = place / "model" / "generation_config.json"
    for text in (DAMAGED[settings.name].decode(), "[]", '{"eos_token_id"'):
        settings.write_text(text)
        with pytest.raises(ModelError, match=r"model/generation_config.json cannot be read: "):
            read_generation_settings(settings.parent)
    assert main(["export", "run", "out"]) == 0


def configuration_has_code(run: Path) -> None:
    (run / "own.py").write_text(CODE)
    edit_json(run / "config.json", auto_map=AUTO_MAP, model_type="own_of_nobody")


RUNS: dict[Callable[[Path], None], str] = {
    configuration_has_code: "no code of a folder is run",
    lambda run: (run / "config.toml").write_text("a = " + "[" * 10_000): "is not TOML",
    lambda run: (run / "config.json").write_text("[" * 100_000): "cannot be loaded",
}


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_a_hostile_run_is_refused_by_export(place: Path, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    change, message = list(RUNS.items())[number]
    change(place / "run")
    refused(["export", "run", "out"], place, capfd, message)
    assert not (place / "out").exists()


def test_no_file_of_a_run_is_written_through_a_link(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, precious = place / "run", place / "precious"
    shutil.rmtree(run / "model")
    config = load_config(run / "config.toml", {"run.dir": str(run), "train.steps": 2})
    written = {path.name for path in run.iterdir()} - {"checkpoints", "evaluation"}
    assert written >= {"run.lock", "metrics.jsonl", "plans.jsonl", "config.json", "tokenizer.json", "corpus"}
    for name in sorted(written | {"model", "completions.jsonl", "output.txt", "evaluation/books", "profile/step-1"}):
        precious.write_text("mine")
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).rename(place / "aside") if (run / name).exists() else None
        (run / name).symlink_to(precious)
        with pytest.raises(
            RunFolderError, match=rf"{name} is a link \(to .*precious\), and a run writes nothing outside"
        ):
            train_rank(0, config, 1)
        assert precious.read_text() == "mine" and (run / name).is_symlink()
        (run / name).unlink()
        (place / "aside").rename(run / name) if (place / "aside").exists() else None

    for name in ("report.html", "checkpoints/step-000001/damaged.txt", "output.txt"):
        (run / name).symlink_to(precious)
    assert main(["report", "run"]) == 0 and "<html" in (run / "report.html").read_text()
    write_damage_notes({run / "checkpoints/step-000001": "cut"}, None)
    output = _Output(os.open("/dev/full", os.O_WRONLY), run / "output.txt")
    assert output.write(b"text") == 4 and output.close() is None
    assert precious.read_text() == "mine" and (run / "checkpoints/step-000001/damaged.txt").read_text() == "cut\n"
    for name in ("output.txt", "checkpoints/step-000001/damaged.txt"):
        (run / name).unlink()

    copies = {path: place / f"copy-{path.name}" for path in run.iterdir() if path.is_file()}
    for path, copy in copies.items():
        copy.hardlink_to(path)
    before = {copy: copy.read_bytes() for copy in copies.values()}
    assert train_rank(0, config, 1).done == 2 and len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert {copy: copy.read_bytes() for copy in before} == before
    capfd.readouterr()

"""Loggers of a run: what is refused before it starts, what becomes of one that fails, and resumed sessions."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from longspan.cli import train
from longspan.config.file import load_config, to_toml
from longspan.errors import ConfigError
from longspan.run import loggers as logger
from longspan.run.checks import check_config
from longspan.run.loggers import RunLoggers, RunStart, WandbLogger, logger_classes, scalars_by_display_name
from tests.train.small import small_config

FAKES = "tests.run.loggers.fake_loggers"


def train_row(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "lr": 0.5}


def eval_row(step: int, cp: int = 2) -> dict[str, Any]:
    return {"step": step, "eval_loss": 2.0 / step, "cp": cp}


def start_of(folder: Path, done: int = 0, rows: tuple[dict[str, Any], ...] = ()) -> RunStart:
    return RunStart(folder, {"train": {"lr": 0.5}}, {"model": "a | b", "steps": "6"}, done, rows)


def session(name: str, start: RunStart, rows: list[dict[str, Any]]) -> list[str]:
    said: list[str] = []
    with RunLoggers(logger_classes([name]), start, said.append) as loggers:
        for row in rows:
            loggers.log(row)
    return said


def test_an_empty_list_of_loggers_is_read_and_written() -> None:
    config = load_config(None, {"run.loggers": []})
    assert config.run.loggers == () and "loggers = []" in to_toml(config)
    for key in ("context.cp_comm_type", "context.hierarchical_context_parallel_sizes"):
        with pytest.raises(ConfigError, match=f"{key} is \\[\\]"):
            load_config(None, {key: []})


def test_a_logger_that_is_not_installed_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ConfigError, match=rf"{name} is not installed; pip install 'longspan\[{name}\]'"):
            check_config(small_config(tmp_path, run__loggers=[name]), 4)
    check_config(small_config(tmp_path, run__loggers=["my_package.MyLogger"]), 4)


LOGINS = [  # variables, and a file with its text -> whether wandb finds a login, or needs none
    ({}, "", "", False),
    ({"WANDB_API_KEY": "x"}, "", "", True),
    ({"WANDB_MODE": "offline"}, "", "", True),
    ({"WANDB_MODE": "online"}, "", "", False),
    ({}, ".netrc", "machine api.wandb.ai\n  login user\n  password x\n", True),
    ({}, ".config/wandb/settings", "[default]\nmode = disabled\n", True),
    ({}, ".config/wandb/settings", "[default]\nentity = us%\n", False),
    ({}, ".config/wandb/settings", "nonsense", False),
]


@pytest.mark.parametrize(("variables", "file", "text", "is_there"), LOGINS)
def test_a_missing_login_is_found_before_processes_start(
    variables: dict[str, str], file: str, text: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    if file:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_CONFIG_DIR", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "run_on_ranks", lambda *_, **__: pytest.fail("processes started"))
    (tmp_path / "config.toml").write_text(to_toml(small_config(tmp_path, run__loggers=["wandb"])))
    error = pytest.fail.Exception if is_there else ConfigError
    with pytest.raises(error, match="processes started" if is_there else "no login to it: wandb login, or"):
        train.main([str(tmp_path / "config.toml"), "--world", "2", "--device", "cpu"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensorbord", "did you mean 'tensorboard'"),
        (f"{FAKES}.Silent", "has Silent without log"),
        (f"{FAKES}.Absent", "has no such class"),
        ("nowhere.Logger", "nowhere cannot be imported: ModuleNotFoundError.*PYTHONPATH"),
    ],
)
def test_names_that_are_no_loggers(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(small_config(tmp_path, run__loggers=[name]), 4)
        logger_classes([name])


def test_a_logger_that_fails_is_said_once_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    names = [f"{FAKES}.Failing", f"{FAKES}.FileLogger"]
    with RunLoggers(logger_classes(names), start_of(tmp_path), said.append) as loggers:
        for step in (1, 2, 3):
            loggers.log(train_row(step))
        loggers.log_completions([{"prompt": "a", "completion": "b"}], 3)  # for loggers that take them
    assert len(said) == 1 and "failed at step 2" in said[0] and "ConnectionError: the server is gone" in said[0]
    assert len(json.loads((tmp_path / "logged.jsonl").read_text())["rows"]) == 3
    (said_at_the_end,) = session(names[0], start_of(tmp_path), [train_row(1)])
    assert "could not be closed: ConnectionError: still gone" in said_at_the_end


def test_the_reason_of_a_logger_stands_in_a_sentence(tmp_path: Path) -> None:
    def refuse(start: RunStart) -> Any:
        raise RuntimeError("No key. Use `wandb login` to log in.")

    with pytest.raises(
        ConfigError, match=r"cannot start: RuntimeError: No key. Use `wandb login` to log in; or leave it"
    ):
        RunLoggers({"wandb": refuse}, start_of(tmp_path), print)


def test_rows_by_the_names_that_loggers_show() -> None:
    assert scalars_by_display_name({"step": 3, "loss": 1, "note": "x", "missing": None}) == {"train/loss": 1}
    of_eval = {"eval/loss_cp4": 2.0 / 3, "eval/seconds_cp4": 0.5}
    assert scalars_by_display_name(eval_row(3, 4) | {"seconds": 0.5}) == of_eval


def test_a_resumed_run_goes_on_in_the_same_tensorboard_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = [train_row(1), train_row(2), eval_row(2), train_row(3), train_row(4), eval_row(4)]
    assert not session("tensorboard", start_of(tmp_path), first)
    again = [train_row(step) | {"lr": 0.25} for step in (3, 4, 5)]
    assert not session("tensorboard", start_of(tmp_path, 2, tuple(first)), [again[0], again[1], eval_row(4), again[2]])
    assert not session("tensorboard", start_of(tmp_path, 5, tuple(first)), [])  # a session without a row
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rates = [(e.step, e.value) for e in read.Scalars("train/lr")]
    assert rates == [(1, 0.5), (2, 0.5), *((step, 0.25) for step in (3, 4, 5))]
    assert [(e.step, e.value) for e in read.Scalars("eval/loss_cp2")] == [(2, 1.0), (4, 0.5)]
    assert read.Tags()["tensors"] == ["run/text_summary"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"id": 3}'])
def test_a_damaged_id_of_wandb_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "wandb.json").write_text(content)
    named = rf"wandb of run.loggers cannot start: RunFolderError: {tmp_path}/wandb.json is damaged \(.*\); put it back"
    with pytest.raises(ConfigError, match=named):
        RunLoggers({"wandb": WandbLogger}, start_of(tmp_path, 2), print)


@pytest.mark.whole
def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = [train_row(1), train_row(2), eval_row(2), train_row(3), train_row(4), eval_row(4)]
    try:
        assert not session("wandb", start_of(tmp_path), first)
        again = [train_row(3), train_row(4), eval_row(4), train_row(5), train_row(6), eval_row(6), eval_row(6, 1)]
        assert not session("wandb", start_of(tmp_path, 2, tuple(first)), again)
    finally:
        wandb.teardown()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len({file.stem for file in files}) == 1 and len(files) == 2
    first_rows, rows = ([*wandb_rows(file)] for file in files)
    assert [int(row["_step"]) for row in first_rows] == [1, 2, 3, 4]
    assert [int(row["_step"]) for row in rows] == [3, 4, 5, 6]
    assert float(first_rows[3]["eval/loss_cp2"]) == float(rows[1]["eval/loss_cp2"]) == 0.5
    assert {"eval/loss_cp1", "eval/loss_cp2", "train/loss"} <= rows[3].keys()


@pytest.mark.whole
def test_completions_are_a_table_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = list[str]()
    try:
        with RunLoggers(logger_classes(["wandb"]), start_of(tmp_path), said.append) as loggers:
            loggers.log(train_row(1))
            loggers.log_completions([{"prompt": "Why?", "completion": "It scatters.", "tokens": 3}], 1)
    finally:
        wandb.teardown()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/completions_*.table.json")
    table = {"columns": ["step", "prompt", "completion"], "data": [[1, "Why?", "It scatters."]]}
    assert json.loads(file.read_text()) == table and not said


def wandb_rows(file: Path) -> Iterator[dict[str, str]]:
    """The history of an offline run: records in the log format of LevelDB, blocks of 32 KiB after 7 bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            history = wandb_internal_pb2.Record.FromString(record).history
            record = b""
            if history.item:
                yield {item.key or "/".join(item.nested_key): item.value_json for item in history.item}


class Service(ModuleType):
    """What the loggers of the examples call of trackio and of MLflow, with the calls that were made."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []
        self.info = SimpleNamespace(run_id="7f")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*words: Any, **keywords: Any) -> Service:
            self.calls.append((name, *words, keywords))
            return self

        return call


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_loggers_of_the_examples_go_on_with_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, run = Service(name), tmp_path / "mine"
    run.mkdir()
    monkeypatch.setitem(sys.modules, name, service)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    logger_name = f"loggers.{name.capitalize()}Logger"
    assert not session(logger_name, start_of(run), [{**train_row(2), "groups": []}, eval_row(2)])
    assert not session(logger_name, start_of(run, 2), [{**eval_row(4), "eval_name": "books"}])
    calls = [(call[0], call[-1] | ({"metrics": call[1]} if len(call) == 3 else {})) for call in service.calls]
    sent = [("train/loss", 0.5), ("train/lr", 0.5)], [("eval/held_out/loss_cp2", 1.0)], [("eval/books/loss_cp2", 0.5)]
    logged = [(*words["metrics"].items(), words["step"]) for call, words in calls if call in ("log", "log_metrics")]
    assert logged == [(*pairs, step) for pairs, step in zip(sent, (2, 2, 4), strict=True)]
    begins = [words for call, words in calls if call in ("init", "start_run")]
    if name == "trackio":
        assert [(words["name"], words["resume"]) for words in begins] == [("mine", "never"), ("mine", "allow")]
        assert begins[0]["project"] == "longspan" and begins[0]["config"]["train"] == {"lr": 0.5}
        assert [call for call, _ in calls].count("finish") == 2
    else:
        assert begins == [{"run_id": None, "run_name": "mine"}, {"run_id": "7f", "run_name": "mine"}]
        assert [call[2] for call in service.calls if call[0] == "log_dict"] == ["from-step-0.json", "from-step-2.json"]
        assert [call for call, _ in calls].count("end_run") == 2

"""`longspan train` and `longspan eval`: what is printed and left, how they fail; losses are the stock ones."""

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longspan.checkpoint.files import PARTIAL
from longspan.cli import processes, train as verb
from longspan.cli.eval import result_tables
from longspan.cli.main import main
from longspan.config.file import load_config, to_toml
from longspan.config.sections import RunConfig
from longspan.errors import CommError, ConfigError, RankLostError
from longspan.launch.stop_signals import Interrupted
from longspan.run.checks import check_config
from longspan.run.facts import TrainResult
from longspan.run.metrics import read_metrics
from longspan.testing import run_ranks
from tests.evaluation.saved.test_comparison import PLANS, result
from tests.report.pages import value_of, words_of
from tests.train.small import small_config, train_rank, write_model, write_texts


def written(folder: Path, **changes: object) -> Path:
    path = folder / "small.toml"
    path.write_text(to_toml(small_config(folder, **changes)))
    return path


def test_plain_lines_a_report_and_the_table_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", str(written(tmp_path)), "--world", "2", "--train.steps", "4", "--run.log_every", "3"]
    words += ["--evaluation.every", "0"]  # at the end alone
    monkeypatch.setattr(sys, "argv", ["longspan", *words])
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert not err and "\x1b" not in out
    lines = out.splitlines()
    assert any(line.startswith("corpus: 12 files") for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("step ") and "tok/s" in line] == ["1/4", "3/4", "4/4"]
    assert any(line.startswith("mean loss of the last 4 steps:") and "% of ln 300" in line for line in lines)
    table = [line.split() for line in lines[-3:-1]]
    assert [row[0] for row in table] == ["1", "2"] and all(float(row[2]) <= 1e-6 for row in table)
    run = tmp_path / "run"
    assert re.search(r"^saved checkpoint 4 \(\S+ MiB\) in \S+ s; training paused for \S+ s$", out, re.MULTILINE)
    last = rf"equal to \S+: the same loss at every degree. Open {run}/report.html; next: \S*longspan eval {run}"
    assert re.fullmatch(last, lines[-1]) and "process groups" not in out
    assert max(len(line.replace(str(tmp_path), "")) for line in lines) < 240
    page = (run / "report.html").read_text()
    assert f"train {tmp_path / 'small.toml'} --world 2" in page and "\npredicted\n" not in words_of(value_of(page))
    assert load_config(run / "config.toml").train.steps == 4


def test_a_rank_that_fails_is_one_line_and_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "bad.jsonl").write_text('{"no": "text"}\n')
    assert main(["train", str(written(tmp_path)), "--world", "2"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: bad.jsonl, line 1: needs text, messages, prompt and completion, input_ids, ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("world", [0, 1, 2, 3])
def test_the_demo_starts_with_any_number_of_processes(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started, stopped = list[int](), [""]

    def run_on_ranks(_: object, args: tuple[RunConfig, int], ranks: int, **__: object) -> TrainResult:
        started.append(check_config(args[0], ranks).slots)
        return TrainResult(tmp_path, done=1, steps=2, stopped=stopped[-1], last_loss=1.0, vocab_size=300, final=())

    monkeypatch.setattr(processes, "usable_gpus", lambda: 0)
    monkeypatch.setattr(verb, "run_on_ranks", run_on_ranks)
    monkeypatch.setattr(verb, "_report_result", lambda *_, **__: None)
    words = ["train", "--run.dir", str(tmp_path / "run"), *["--world", str(world)][: 2 * world]]
    assert main([*words, "--checkpoint.preempted_exit_code", "75"]) == 0 and started == [world or 1]
    stopped.append("SIGTERM")  # a run that was told to stop ends with the status of its key
    assert [main([*words, "--checkpoint.preempted_exit_code", status]) for status in ("0", "75")] == [0, 75]
    assert main([*words, "--data.path", str(tmp_path / "nope.jsonl")]) == 2
    assert "nope.jsonl" in capfd.readouterr().err


FAILURES: list[tuple[list[BaseException], int, str]] = [  # what is raised, one after the other: status, what is said
    ([ConfigError("no")], 2, "error: no\n"),
    ([CommError("ranks disagree")], 2, "error: ranks disagree\n"),
    ([RankLostError("killed")], 3, "error: killed\n"),
    ([Interrupted(signal.SIGUSR1)], 75, "interrupted by SIGUSR1\n"),
    # torchrun sends SIGTERM to the ranks that are left, which may then be leaving their world
    ([RankLostError("killed"), Interrupted(signal.SIGTERM)], 3, "error: killed\n"),
]


@pytest.mark.parametrize(("errors", "status", "says"), FAILURES)
def test_the_exit_status_of_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    errors: list[BaseException],
    status: int,
    says: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            raise errors[0]
        finally:
            raise errors[-1]

    monkeypatch.setattr(verb, "run_on_ranks", fail)
    assert main(["train", "--world", "4", "--checkpoint.preempted_exit_code", "75"]) == status
    assert capfd.readouterr().err == says


# ---- longspan eval: the loss of a run or folder does not depend on the degree


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("eval")
    sets = [{"name": "others", "path": str(write_texts(folder / "others", 4)), "context_parallel_size": 1}]
    config = small_config(folder, train__steps=2, checkpoint__every=1, evaluation__sets=sets)
    run_ranks(train_rank, 2, config, 2)
    (Path(config.run.dir) / "checkpoints" / f"step-000009{PARTIAL}").mkdir()  # a save that was interrupted
    return config


@pytest.mark.parametrize(
    ("world", "checkpoint", "degree"),
    [(3, "", "3"), (2, "step-000002", "dynamic"), pytest.param(2, "step-000002", "auto", marks=pytest.mark.whole)],
)
def test_the_loss_is_that_of_the_run(
    run: RunConfig, capfd: pytest.CaptureFixture[str], world: int, checkpoint: str, degree: str
) -> None:
    target = f"{run.run.dir}/checkpoints/{checkpoint}" if checkpoint else run.run.dir
    before = sorted(Path(run.run.dir).rglob("*"))
    flags = ["--json", "--evaluation.context_parallel_size", degree, "--evaluation.max_tokens_per_slot", "64"]
    if degree == "dynamic":  # which training was not: this key alone makes it so
        flags[1:] = "--evaluation.max_dynamic_context_parallel_size", "2", "--evaluation.max_tokens_per_slot", "32"
    assert main(["eval", target, "--world", str(world), *flags]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert err.count("its save was interrupted") == (not checkpoint), "one rank says it, where checkpoints are sought"
    trained = [row for row in read_metrics(Path(run.run.dir) / "metrics.jsonl") if "eval_name" not in row][-1]
    assert (found["step"], found["world"]) == (2, world)
    if degree == "auto":
        assert err.count(f"at cp {found['cp']}") == 1 and "5 documents; cp " in err
    else:
        assert found["cp"] == {"3": 3, "dynamic": 2}[degree]
    assert found["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    assert found["eval_tokens"] == trained["eval_tokens"]
    assert sorted(Path(run.run.dir).rglob("*")) == before


def test_a_comparison(run: RunConfig, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["eval", run.run.dir, "--compare", f"{run.run.dir}/model", "--json", "--world", "2"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capfd.readouterr().out)
    trained = [row for row in read_metrics(Path(run.run.dir) / "metrics.jsonl") if "eval_name" not in row][-1]
    assert found["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-6)
    (difference,) = found["compare"]["differences"]
    assert abs(difference["difference"]) < 1e-6 and found["compare"]["kind"] == "folder"
    assert [row[:2] for row in found["by_length"]] == [row[:2] for row in trained["by_length"]]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found


def test_an_earlier_checkpoint_has_another_loss_in_words(run: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", f"{run.run.dir}/checkpoints/step-000001"]) == 0  # on as many processes as the run had
    out, err = capfd.readouterr()
    title, names, values = out.splitlines()[:3]
    assert title == f"{run.run.dir}/checkpoints/step-000001, step 1 on 2 ranks"
    assert "bits per byte" in names and values.startswith(" 2  5.03") and values.endswith("fixed  held out")
    assert not err


def test_damaged_checkpoints_are_named(run: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(run.run.dir) / "checkpoints" / "step-000001"
    (file := max(path.glob("*.safetensors"))).unlink()
    assert main(["eval", str(path), "--world", "2"]) == 2
    assert capfd.readouterr().err == f"error: checkpoint {path}: {file.name} is missing\n"
    assert main(["eval", str(tmp_path)]) == 2
    assert "is neither the folder of a run (it has no config.toml) nor a Hugging Face folder" in capfd.readouterr().err


def test_tables_leave_out_what_nobody_can_read() -> None:
    names, row = next(result_tables([result(np.full(5, 50.0), PLANS[0])], 1)).splitlines()[1:3]
    assert names.split()[:4] == ["cp", "loss", "difference", "perplexity"]
    assert row.split()[:6] == ["1", "50.000000000", "0.0e+00", "over", "1e21", "5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eval_folder")
    write_model(root)
    return root


def test_documents_have_the_stock_models_loss(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*"))
    words = ["eval", str(folder / "model"), "--data", f"words={folder / 'texts'}", "--json", "--world", "2"]
    words += ["--out", str(tmp_path), "--model.dtype", "float64", "--split", "train[-11:]"]
    assert main([*words, "--evaluation.context_parallel_size", "2", "--evaluation.cp_comm_type", "a2a"]) == 0
    files = sorted((folder / "texts").iterdir())[-11:]
    record: dict[str, Any] = json.loads(capfd.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="sdpa")
    tokenizer, expected = AutoTokenizer.from_pretrained(folder / "model"), list[tuple[float, int]]()
    for file in files:
        ids = torch.tensor([[*tokenizer(file.read_text()).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        expected.append((float(loss), ids.shape[1] - 1))
    rows = [json.loads(line) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx([loss / targets for loss, targets in expected], rel=1e-12)
    assert [row["name"] for row in rows] == [file.name for file in files]
    total, targets = (sum(values) for values in zip(*expected, strict=True))
    assert (record["eval_loss"], record["eval_targets"]) == (pytest.approx(total / targets, rel=1e-12), targets)
    assert (record["cp"], record["evaluations"][0]["cp_comm_type"], record["kind"]) == (2, ["a2a"], "folder")
    assert sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*")) == before


REFUSED = [
    ("--degrees 1,x", "--degrees is '1,x'"),
    ("--degrees 1,2 --compare MODEL", "--degrees and --compare are given"),
    ("--compare nowhere", "there is no run nowhere"),
    ("--split test", "--split is 'test' and there is no --data"),
    ("--data a=x --data a=y", "--data x and y are both named 'a'"),
    (
        "--context.cp_comm_type a2a",
        "--context.cp_comm_type is a key of training; evaluation reads --evaluation.cp_comm_type",
    ),
    ("--context.mode free", "--context.mode is a key of training, and evaluation does not read it"),
    ("--parallel.tp 3 --world 2", "2 ranks are not divisible by tp 3 x pp 1 = 3"),
    ("--evaluation.context_parallel_size 2", "evaluation.context_parallel_size 2 does not divide 1 slot"),
    ("--out MODEL/config.json", "--out: cannot write to MODEL/config.json: File exists; give another folder"),
    ("--max-document-tokens 1", "--max-document-tokens is 1; a document of one token predicts nothing"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_refused_before_ranks_start(folder: Path, capfd: pytest.CaptureFixture[str], words: str, message: str) -> None:
    model = str(folder / "model")
    assert main(["eval", model, *words.replace("MODEL", model).split()]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith(f"error: {message.replace('MODEL', model)}") and len(err.splitlines()) == 1


@pytest.mark.parametrize("keys", [{}, {"lora.rank": 4}])
def test_the_next_command_of_a_run_without_held_out_documents_names_rows(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("longspan.report.write_report", lambda folder: folder / "report.html")
    compared = " --compare base" if keys else ""
    for final, rows in (((), " --data ROWS"), ((result(np.ones(5), PLANS[0]).sets[0].evaluation,), "")):
        trained = TrainResult(tmp_path, 1, 1, "", 2.0, 0, final)
        verb._report_result(trained, load_config(None, keys), as_json=False)  # pyright: ignore[reportPrivateUsage]
        assert capsys.readouterr().out.endswith(f"longspan eval {tmp_path}{rows}{compared}\n")

"""`longspan train` as a user meets it: what it prints, what it leaves, and how it fails."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli import processes
from longspan.cli import train as verb
from longspan.cli.main import main
from longspan.config.file import load_config, to_toml
from longspan.config.sections import RunConfig
from longspan.errors import CommError, ConfigError, RankLostError
from longspan.launch.stop_signals import Interrupted
from longspan.run.checks import check_config
from longspan.run.facts import TrainResult
from tests.report.pages import value_of, words_of
from tests.train.small import small_config


def written(folder: Path, **changes: object) -> Path:
    path = folder / "small.toml"
    path.write_text(to_toml(small_config(folder, **changes)))
    return path


def test_plain_lines_a_report_and_the_table_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", str(written(tmp_path)), "--world", "2", "--train.steps", "4", "--run.log_every", "3"]
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
    assert main([*words, "--json"]) == 0
    again = capfd.readouterr()
    assert json.loads(again.out)["step"] == 4 and "going on from" in again.err
    assert "it is shown; its config.toml and what is in metrics.jsonl stay" in again.err


def test_a_rank_that_fails_is_one_line_and_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "bad.jsonl").write_text('{"no": "text"}\n')
    assert main(["train", str(written(tmp_path)), "--world", "2"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: bad.jsonl, line 1: needs text, messages, prompt and completion, input_ids, ")
    assert len(err.splitlines()) == 1


@pytest.mark.whole  # tests/launch/test_two_nodes.py starts ranks by torchrun too, on two nodes and on one
def test_torchrun_starts_the_ranks_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words = ["-m", "longspan.cli.main", "train", str(written(tmp_path, train__steps=2))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += words
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("relative difference") == 1 and (tmp_path / "run" / "report.html").is_file()


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
    assert main([*words, "--run.stopped_status", "75"]) == 0 and started == [world or 1]
    stopped.append("SIGTERM")  # a run that was told to stop ends with the status of its key
    assert [main([*words, "--run.stopped_status", status]) for status in ("0", "75")] == [0, 75]
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
    assert main(["train", "--world", "4", "--run.stopped_status", "75"]) == status
    assert capfd.readouterr().err == says

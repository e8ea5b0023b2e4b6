"""The configurations in examples/ fit the ranks that their commands start; the program for GPUs runs on CPUs too."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli.flags import parse_train
from longspan.run.checks import check_config
from longspan.train.plans import PlanChoice

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples").rglob("*.toml"))


def commands(path: Path) -> list[tuple[int, list[str]]]:
    """The ranks and the words after `longspan train` of every such command in the comment that begins a file."""
    found = []
    for line in re.findall(r"^#   (.*longspan train .*)$", path.read_text(), flags=re.MULTILINE):
        words = shlex.split(line)
        flag = next(flag for flag in ("--world", "--nproc-per-node", "--ranks") if flag in words)
        nodes = 2 if words[0].endswith("two_nodes.sh") else 1
        found.append((nodes * int(words[words.index(flag) + 1]), words[words.index("train") + 1 :]))
    return found


CASES = [pytest.param(ranks, words, id=f"{path.stem}-{ranks}") for path in FILES for ranks, words in commands(path)]


@pytest.mark.parametrize(("ranks", "words"), CASES)
def test_a_configuration_fits_the_ranks_of_its_command(
    ranks: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("longspan.cli.flags.find_folders", lambda config, **_: config)  # data that nobody has made yet
    _, config = parse_train(words)
    home = check_config(config, ranks)
    choice = PlanChoice.training(config)
    longest = config.data.max_document_tokens
    choice.check_longest_document(longest, home, f"a document of {longest} tokens")
    PlanChoice.evaluation(config).check_longest_document(longest, home, f"a document of {longest} tokens")
    assert longest <= config.train.tokens_per_step


def test_every_configuration_states_its_command() -> None:
    assert all(commands(path) for path in FILES) and len(FILES) >= 8
    eight = [path for path in FILES if any(ranks == 8 for ranks, _ in commands(path))]
    assert len(eight) >= 3


@pytest.mark.whole  # the program of docs/evaluation.md stands for it
def test_the_program_evaluates_at_both_degrees(tmp_path: Path) -> None:
    program = (ROOT / "examples/gpu/eval_live.py").read_text()
    (command,) = re.findall(r"^`python (.*)`$", program, flags=re.MULTILINE)
    record = tmp_path / "rows.json"
    words = [sys.executable, *shlex.split(command), "--record", str(record)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert [row["cp"] for row in rows if row["what"] == "evaluation"] == [1, 2, 1] + [1, 2] * 3
    assert [row["cp"] for row in rows if row["what"] == "training"] == [1, 1, 1, 2, 1, 2]
    assert rows[5]["loss"] == rows[3]["loss"] and max(row.get("difference", 0) for row in rows) <= 1e-6

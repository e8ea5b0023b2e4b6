"""A cost file: what is said of one that is none, the same in training and on the command line."""

import doctest
import json
import re
from pathlib import Path

import pytest

from longspan.cli.main import main
from longspan.config.sections import RunConfig, RunSection
from longspan.errors import ConfigError
from longspan.plan import Cost
from longspan.plan.cost import model_cost as cost_file
from longspan.train.plans import cost_of

BAD = [  # what is in the place of the file, what is said of it
    (None, "holds no cost: No such file or directory"),
    ("folder", "is a folder"),
    ("{", "holds no cost: Expecting property name"),
    (b"\xff", "holds no cost: 'utf-8' codec"),
    ('{"speed": 1}', "holds no cost: a cost is an object with numbers for some of linear_seconds"),
    ('{"ring_bytes": -1}', "holds no cost: ring_bytes is -1; give a finite number"),
    ("[]", "holds no cost: a cost is an object"),
]


@pytest.mark.parametrize(("text", "complaint"), BAD, ids=[complaint[:40] for _, complaint in BAD])
def test_a_file_without_a_cost_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes | None, complaint: str
) -> None:
    path = tmp_path / "cost.json"
    if text == "folder":
        path.mkdir()
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    advice = "; give the file that `longspan bench calibrate --out FILE.json` writes for this machine"
    with pytest.raises(ConfigError, match=rf"run\.machine {path} {re.escape(complaint)}.*{advice}$"):
        cost_of(RunConfig(run=RunSection(machine=str(path))))
    for verb in (["plan"], ["simulate"], ["bench", "step", "--world", "2"]):
        slots, key = ([], "run.machine") if verb[0] == "bench" else (["--slots", "2"], "--machine")
        assert main([*verb, *slots, "--same", "2x8", f"--{key.removeprefix('--')}", str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {key} {path} {complaint}") and said.endswith(f"{advice}\n")


def test_a_file_with_a_cost_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"ring_bytes": 7}))
    assert cost_file.read_machine(str(path), "--machine") == Cost(ring_bytes=7, exchange_bytes=7 * 1474560 / 442368)


def test_docstrings_show_what_happens() -> None:
    outcome = doctest.testmod(cost_file)
    assert outcome.attempted and not outcome.failed

"""What a disk refuses is said with the file and the room that there is; numbers that JSON lacks are written as null."""

import json
import math
import os
import re
import uuid
from pathlib import Path

import pytest

from longspan.errors import RunFolderError
from longspan.files import as_json, name_file_in_errors, os_error_text, write_atomically
from longspan.report import write_report
from longspan.run.metrics import MetricsLog, read_metrics

FULL = r"No space left on device \([\d,]+ bytes are free\); make room there and start the same command again"


def fill_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `write_atomically` find a full disk where it writes this file."""
    name = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: name)
    path.with_name(f"{path.name}.partial-{name.hex[:8]}").symlink_to("/dev/full")


def test_a_whole_file_on_a_full_disk_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    write_atomically(path, "old")
    fill_disk(path, monkeypatch)
    with pytest.raises(OSError) as error:
        write_atomically(path, "new")
    assert re.match(f"{path}: {FULL}", os_error_text(error.value))
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"] and path.read_text() == "old"


def test_a_row_on_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", after_step=0) as log:
        assert log._file is not None
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, log._file.fileno())
        os.close(full)
        with pytest.raises(OSError) as error:
            log.write({"step": 1})
    assert re.match(rf"{tmp_path}/metrics.jsonl: {FULL}", os_error_text(error.value))


def test_a_report_on_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    fill_disk(tmp_path / "report.html", monkeypatch)
    with pytest.raises(RunFolderError, match=f"^{tmp_path}/report.html: {FULL}"):
        write_report(tmp_path)


def test_reasons_of_other_kinds() -> None:
    with pytest.raises(OSError) as error, name_file_in_errors(Path("/nowhere/file")):
        raise OSError(5, os.strerror(5))
    assert os_error_text(error.value) == "/nowhere/file: Input/output error"
    with pytest.raises(FileNotFoundError) as error, name_file_in_errors(Path("other")):
        Path("/nowhere/at/all").read_bytes()
    assert os_error_text(error.value) == "/nowhere/at/all: No such file or directory"


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": null, "grad_norm": null}\n')
    with MetricsLog(path, after_step=1) as log:
        log.write({"step": 2, "loss": math.inf, "lr": 0.5})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    wanted = [{"step": 1, "loss": None, "grad_norm": None}, {"step": 2, "loss": None, "lr": 0.5}]
    assert lines == wanted == read_metrics(path)
    assert as_json({"a": [{"b": -math.inf}, (1.0, math.nan)]}) == '{"a": [{"b": null}, [1.0, null]]}'

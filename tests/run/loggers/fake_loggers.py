"""Loggers that tests name by their dotted names."""

import json
from collections.abc import Mapping
from typing import Any

from longspan.files import json_safe_values
from longspan.run.loggers import RunStart


class FileLogger:
    def __init__(self, start: RunStart) -> None:
        self._start, self._rows = start, list[Any]()
        self._summary = False  # whether the first row came beside a summary of an earlier end

    def log(self, row: Mapping[str, Any], step: int) -> None:
        assert row["step"] == step
        self._summary |= not self._rows and (self._start.dir / "summary.json").exists()
        self._rows.append(json_safe_values(row))

    def close(self) -> None:
        session = {"done": self._start.done, "rows": self._rows, "summary": self._summary, "closed": True}
        with (self._start.dir / "logged.jsonl").open("a") as file:
            file.write(json.dumps(session) + "\n")


class Refusing(FileLogger):
    def __init__(self, start: RunStart) -> None:
        raise RuntimeError(f"no server for {start.dir.name}")


class Failing(FileLogger):
    """Fails at every row from step 2 on, and when it is closed."""

    def log(self, row: Mapping[str, Any], step: int) -> None:
        super().log(row, step)
        if step > 1:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("still gone")


class Silent:
    """No logger: it has no log and no close."""

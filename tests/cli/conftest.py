"""Verbs of these tests run on CPUs, also on a machine with GPUs."""

import pytest

from longspan.cli import processes


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_gpus", lambda: 0)

"""Fixtures of tests of Trainers, which are left out where TRL is not installed (the extra `hf`)."""

from importlib.util import find_spec

import pytest

from tests.hf.tiny import model_of

if find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    model_of().save_pretrained(folder)
    return folder

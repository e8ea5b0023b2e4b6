"""Fixtures of tests of Trainers."""

import pytest

from tests.hf.stock import model_of


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in a folder, as a reference is loaded from one."""
    folder = str(tmp_path_factory.mktemp("model"))
    model_of().save_pretrained(folder)
    return folder

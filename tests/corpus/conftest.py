"""A cache of tokens of each test's own: what another one has made is not found there."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(token_cache: Path) -> Path:
    return token_cache

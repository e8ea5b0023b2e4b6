"""A world of one rank, in which tests of one process prepare models."""

from collections.abc import Iterator

import pytest

from longspan import Layout, World
from longspan.testing import backend


@pytest.fixture
def world() -> Iterator[World]:
    with World(Layout(1), backend=backend()) as opened:
        yield opened

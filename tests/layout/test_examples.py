"""The calls shown in the docstrings give what the docstrings say."""

import doctest

import numpy as np
import pytest

from longspan import layout
from longspan.layout import exchange, partition, segments

NAMES = {"np": np} | {name: getattr(layout, name) for name in layout.__all__}


@pytest.mark.parametrize("module", [layout.layout, partition, segments, exchange], ids=lambda m: m.__name__)
def test_docstrings(module):
    failed, tried = doctest.testmod(module, extraglobs=NAMES)
    assert failed == 0 and tried > 0

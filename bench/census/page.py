"""docs/models.md, made from the record of the census and the table of kernels."""

from collections.abc import Mapping
from typing import Any

import torch

from bench.census.record import WAYS, counts
from longspan.attention.kernels import KERNELS


def page(record: Mapping[str, Any]) -> str:
    return ""

"""Flags that the matrices of training and of evaluation share."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def matrix_flags(description: str | None, add: Callable[[argparse.ArgumentParser], object]) -> argparse.Namespace:
    """The flags of this command; tests' functions then open their worlds with `--backend`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add(parser)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--most", type=int, default=1 << 30, help="so many of each part, drawn once")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    os.environ["LONGSPAN_TEST_BACKEND"] = flags.backend
    return flags

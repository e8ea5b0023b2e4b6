"""Triton's kernels on a CPU that has Triton, by its interpreter."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from packaging.version import Version


def run_interpreted(module: str) -> None:
    if find_spec("triton") is None or Version(version("triton")) < Version("3.7"):
        pytest.skip("needs triton 3.7 or later: the interpreter of 3.6 takes no bounds of loops from tensors")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", f"import {module} as module; module.interpreted()"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr

"""Tests of Trainers are left out where TRL is not installed (the extra `hf`)."""

import os
from importlib.util import find_spec

if find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]
# What is experimental in TRL warns of itself.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

"""Tests of Trainers are left out where TRL is not installed (the extra `hf`)."""

from importlib.util import find_spec

if find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]

"""Options of the whole suite: the same test files run with gloo on CPUs and with NCCL on GPUs."""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=["gloo", "nccl"], default="gloo", help="what distributed tests open their worlds with"
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["LONGSPAN_TEST_BACKEND"] = config.getoption("--backend")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

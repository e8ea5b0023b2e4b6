"""What a record says of its machine, with and without GPUs."""

from typing import Any

import pytest

from longspan.cli.machine import machine_facts, machine_text

HOST = {"processor": "A processor", "cores": 64, "memory_bytes": 512 * 2**30, "system": "Linux x86_64"}
GPUS = {"cuda": "13.0", "cudnn": 91300, "nccl": "2.28.3", "gpu_memory_bytes": 2**37}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (HOST, "64 cores of A processor, 512 GiB"),
        (
            HOST | GPUS | {"gpus": ["H200", "H200", "L4"]},
            "2 x H200 and 1 x L4 (CUDA 13.0, cuDNN 91300, NCCL 2.28.3); 64 cores of A processor, 512 GiB",
        ),
    ],
)
def test_a_machine_in_one_line(facts: dict[str, Any], text: str) -> None:
    assert machine_text(facts) == text


def test_this_machine_is_described() -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1 and facts["memory_bytes"] > 2**20 and facts["processor"]
    assert f"{facts['cores']} cores of {facts['processor']}" in machine_text(facts)

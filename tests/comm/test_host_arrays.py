"""Arrays of the host on the device: pytest --backend nccl for a GPU."""

import numpy as np
import pytest
import torch

from longspan.comm import to_device
from longspan.testing import backend

DEVICE = torch.device("cuda" if backend() == "nccl" else "cpu")


@pytest.mark.parametrize(
    "array", (np.arange(7), np.zeros(0, np.int64), np.ones((2, 3), np.int32), np.float64(1) * np.eye(2))
)
def test_an_array_arrives_as_it_is(array: np.ndarray) -> None:
    tensor = to_device(array, DEVICE)
    assert tensor.device.type == DEVICE.type and tensor.shape == array.shape
    assert np.array_equal(tensor.cpu().numpy(), array) and tensor.cpu().numpy().dtype == array.dtype


def test_on_a_cpu_memory_is_shared() -> None:
    array = np.arange(3)
    to_device(array, "cpu")[0] = 5
    assert array[0] == 5


def test_on_a_gpu_the_array_may_change_at_once() -> None:
    """What arrives is what it held when it was given, also where the device is busy meanwhile."""
    if DEVICE.type != "cuda":
        pytest.skip("needs --backend nccl and a GPU")
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy * 1e-3
    array = np.arange(1 << 16)
    tensor = to_device(array, DEVICE)
    array[:] = -1
    assert torch.equal(tensor.cpu(), torch.arange(1 << 16))

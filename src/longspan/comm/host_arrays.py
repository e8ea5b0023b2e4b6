"""Integers of the host on the device: ids, positions, orders of rows."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(x: npt.NDArray[np.generic], device: torch.device | str) -> Tensor:
    """An array as a tensor on `device`; on a CPU it shares the array's memory.

    On a GPU it goes through page-locked memory and the host does not wait. From ordinary memory CUDA lets all work that
    is queued come to its end first, so that every micro-batch would begin with an empty queue.
    """
    tensor: Any = torch.from_numpy(x)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

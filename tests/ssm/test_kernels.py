"""Which kernels take a recurrence, and what a device lacks for others."""

import torch

from longspan.ssm.kernels import TORCH, Recurrence, choose_scan_kernel, describe_kernels
from longspan.ssm.kernels import delta as by_channel
from longspan.ssm.kernels.convolutions import choose_convolution

CPU = torch.device("cpu")
SCAN = Recurrence(torch.bfloat16, CPU, 16, 16, delta=False, by_channel=False)


def test_torch_takes_what_no_other_kernel_can() -> None:
    assert choose_scan_kernel(SCAN) is TORCH and choose_scan_kernel(SCAN._replace(delta=True)) is TORCH
    assert choose_convolution(torch.zeros(3, 8, dtype=torch.bfloat16)).name == "torch"
    assert describe_kernels(torch.bfloat16, CPU) == "torch's operations"
    of_channels = "a delta rule of a decay for each key number"
    assert (
        by_channel.kimi_lack(SCAN._replace(delta=True))
        == by_channel.kimi_lack(SCAN._replace(by_channel=True))
        == of_channels
    )

"""First rows of runs behind rows that arrived, by kernels of `first_rows.py` beside torch's in float64."""

from itertools import product

import torch

from longspan import Group
from longspan.comm import ShardPart
from longspan.ssm.chains import Chains
from longspan.ssm.conv import find_halo
from longspan.ssm.kernels.convolutions import TORCH_CONVOLUTION, Convolution, arrived_gradients, write_first
from tests.reference import relative_error

LENGTHS = (9, 1, 14, 2, 3)
CHANNELS = 300  # of two programs
CASES = tuple(product(("contiguous", "zigzag"), (2, 4, 9), (False, True)))


def errors(partition: str, width: int, extras: bool, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of outputs and of what is entry_gradients to arrived rows, the worst member's.

    `extras`: with a bias and SiLU, of tensors whose channels are not next to each other.
    """
    group = Group((0, 1, 2), tuple(range(len(LENGTHS))), LENGTHS, partition=partition)  # pyright: ignore
    generator, worst = torch.Generator().manual_seed(0), {"y": 0.0, "owed": 0.0}
    for member in range(3):
        chains = Chains(ShardPart(group, member, member, 0, world_key=-1), device)
        halo, rows = find_halo(chains, width - 1), int(chains.lengths.sum())
        shapes = (rows, CHANNELS), (rows, CHANNELS), (sum(halo.receives), CHANNELS), (CHANNELS, width), (CHANNELS,)
        x, dout, arrived, weight, bias = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
        if not len(arrived):
            continue
        x, dout = ((t.t().contiguous().t() if extras else t) for t in (x, dout))
        found, wanted = list[torch.Tensor](), list[torch.Tensor]()
        for exact, results in ((False, found), (True, wanted)):
            x_, dout_, arrived_, weight_, bias_ = (t.double() if exact else t for t in (x, dout, arrived, weight, bias))
            convolution, y = Convolution(weight_, bias_ if extras else None, extras), torch.zeros_like(x_)
            (TORCH_CONVOLUTION.write_first if exact else write_first)(y, x_, arrived_, convolution, halo.first)
            gradients = (TORCH_CONVOLUTION.arrived_gradients if exact else arrived_gradients)(
                dout_, x_, arrived_, convolution, halo.first
            )
            results += [y, gradients]
        for name, a, b in zip(worst, found, wanted, strict=True):
            worst[name] = max(worst[name], relative_error(a.double(), b))
    return worst

"""Scans and convolutions over ranks beside the recurrences row by row: outputs and every gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan import Group, Layout, MicroBatch, World, bind
from longspan.comm import SequenceShard
from longspan.ssm import causal_conv, linear_scan
from longspan.testing import backend
from tests.reference import relative_error
from tests.ssm.recurrence import KINDS, by_rows, convolved, inputs

HEADS, SIZE, WIDTH = 2, 4, 3
LENGTHS = {
    "one document": (37,),
    "one row": (1,),
    "shorter than the convolution": (2, 1, 3, 1, 2),
    "ragged": (9, 1, 14, 2, 3),
    "long and short": (70, 1, 2, 19),
    "fewer rows than members": (1, 2),
}


def batches(lengths: Sequence[int], slots: int, partition: str) -> dict[str, MicroBatch]:
    """All slots in one group; two groups of which slot 0 is in both; a group padded out."""
    everyone, ids = tuple(range(slots)), tuple(range(len(lengths)))
    made = {"one group": MicroBatch((Group(everyone, ids, tuple(lengths), partition=partition),))}
    if len(lengths) > 2:
        first = Group(everyone[: max(1, slots - 1)], ids[:2], tuple(lengths[:2]), partition=partition)
        second = Group((slots - 1,) if slots == 1 else (slots - 1, 0), ids[2:], tuple(lengths[2:]), partition=partition)
        made["two groups"] = MicroBatch((first, second))
    if slots > 1:
        made["padded"] = MicroBatch((Group(everyone, ids, tuple(lengths), pad_to=max(lengths) + 3),))
        made["slots in reverse"] = MicroBatch((Group(everyone[::-1], ids, tuple(lengths), partition=partition),))
    return made


def measure(
    rank: int, slots: int, names: Sequence[str], seed: int = 0, quick: bool = False
) -> dict[tuple[str, ...], float]:
    """The worst error of each case, over the rows and gradients of this rank; `quick`: of one group and a few kinds."""
    kinds, widths = (("delta", "one number a head"), (4,)) if quick else (tuple(KINDS), (2, 4, 9))
    worst: dict[tuple[str, ...], float] = {}
    with World(Layout(ranks=slots), backend=backend()) as world:
        for name in names:
            for partition in ("zigzag", "contiguous"):
                for shape, batch in batches(LENGTHS[name], slots, partition).items():
                    if quick and shape != "one group":
                        continue
                    shard = bind(batch, world).with_padding()
                    order = [d for group in batch.groups for d in group.documents]
                    lengths = [LENGTHS[name][d] for d in order]
                    for kind in kinds:
                        worst[name, partition, shape, kind] = scan_error(kind, lengths, shard, world, seed)
                    for width in widths:
                        worst[name, partition, shape, f"convolution {width}"] = conv_error(width, lengths, shard, world)
    return worst


def scan_error(
    kind: str,
    lengths: Sequence[int],
    shard: SequenceShard,
    world: World,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> float:
    given = inputs(kind, sum(lengths), HEADS, SIZE, WIDTH, seed)
    wanted = by_rows(*given, lengths)  # pyright: ignore[reportArgumentType]
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    exact = torch.autograd.grad(wanted, [x for x in given if x is not None], dout)
    leaves = [
        None if x is None else shard.scatter(x.detach().to(shard.rows.device, dtype)).requires_grad_() for x in given
    ]
    out = linear_scan(*leaves, shard)  # pyright: ignore[reportArgumentType]
    (out * shard.scatter(dout.to(out))).sum().backward()
    found = [out, *(x.grad for x in leaves if x is not None)]
    return _worst(found, [wanted, *exact], shard)


def conv_error(width: int, lengths: Sequence[int], shard: SequenceShard, world: World) -> float:
    generator = torch.Generator().manual_seed(width)
    shapes = ((sum(lengths), 5), (5, width), (5,))
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    wanted = convolved(x, weight, bias, lengths)
    dout = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    exact = torch.autograd.grad(wanted, (x, weight, bias), dout)
    here = [p.detach().to(world.device, copy=True) for p in (x, weight, bias)]
    local = [p.requires_grad_() for p in (shard.scatter(here[0]), *here[1:])]
    out = causal_conv(*local, shard)
    (out * shard.scatter(dout.to(out))).sum().backward()
    summed = [world.control.sum_over_slots(p.grad.flatten().tolist()) for p in local[1:]]  # pyright: ignore
    of_weights = [
        relative_error(torch.tensor(s, dtype=torch.float64), e.flatten())
        for s, e in zip(summed, exact[1:], strict=True)
    ]
    return max(_worst([out, local[0].grad], [wanted, exact[0]], shard), *of_weights)  # pyright: ignore


def _worst(found: Sequence[Tensor], exact: Sequence[Tensor], shard: SequenceShard) -> float:
    """Of this rank's rows, against the size of the whole."""
    errors = []
    for x, whole in zip(found, exact, strict=True):
        rows = shard.rows >= 0
        difference = (x.detach() - shard.scatter(whole.detach().to(x.device)))[rows]
        assert not torch.isnan(difference).any()
        errors.append((difference.norm() / whole.norm().clamp(min=1e-9)).item())
    return max(errors)

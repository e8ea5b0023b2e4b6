"""Scans and convolutions over ranks beside the recurrences row by row in float64: outputs and every gradient."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan import Group, Layout, MicroBatch, World, bind
from longspan.comm import SequenceShard, ShardPart
from longspan.ssm import causal_conv, linear_scan
from longspan.ssm.chains import Chains
from longspan.ssm.conv import cached_reads
from longspan.ssm.kernels.convolutions import TORCH_CONVOLUTION, Convolution, arrived_gradients, write_first_outputs
from longspan.testing import backend
from tests.reference import relative_error

HEADS, SIZE, WIDTH = 2, 4, 3
LENGTHS = {
    "one document": (37,),
    "one row": (1,),
    "shorter than the convolution": (2, 1, 3, 1, 2),
    "ragged": (9, 1, 14, 2, 3),
    "long and short": (70, 1, 2, 19),
    "fewer rows than members": (1, 2),
}
KINDS = {  # decays a head, whether there is a delta term
    "delta": (1, True),
    "delta by channel": (None, True),
    "one number a head": (1, False),
}


def inputs(kind: str, rows: int, heads: int, size: int, width: int, seed: int = 0) -> list[Tensor | None]:
    """q, k, v, g and beta of slow decays, keys of norm 1 under a delta term, all float64 leaves."""
    generator = torch.Generator().manual_seed(seed)
    decays, delta = KINDS[kind]
    draw = [torch.randn(rows, heads, n, generator=generator, dtype=torch.float64) for n in (size, size, width)]
    g = -0.2 * torch.rand(rows, heads, decays or size, generator=generator, dtype=torch.float64)
    beta = 2 * torch.rand(
        rows, heads, generator=generator, dtype=torch.float64
    )  # up to 2, as with negative eigenvalues
    draw[1] = F.normalize(draw[1], dim=-1) if delta else draw[1]
    return [x.requires_grad_() for x in (*draw, g)] + [beta.requires_grad_() if delta else None]


def by_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, lengths: Sequence[int]) -> Tensor:
    outs, row = [], 0
    for length in lengths:
        state = v.new_zeros((k.shape[1], k.shape[2], v.shape[2]))
        for _ in range(length):
            state = g[row].exp().unsqueeze(-1) * state
            new = v[row]
            if beta is not None:
                seen = torch.einsum("hk,hkv->hv", k[row], state)
                new = beta[row].unsqueeze(-1) * (v[row] - seen)
            state = state + k[row].unsqueeze(-1) * new.unsqueeze(1)
            outs.append(torch.einsum("hk,hkv->hv", q[row], state))
            row += 1
    return torch.stack(outs) if outs else v[:0]


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int]) -> Tensor:
    outs = []
    for document in x.split(list(lengths)):
        padded = torch.cat([x.new_zeros((weight.shape[1] - 1, x.shape[1])), document])
        terms = [padded[i : i + len(document)] * weight[:, i] for i in range(weight.shape[1])]
        outs.append(sum(terms) if bias is None else sum(terms) + bias)
    return torch.cat(outs)


def batches(lengths: Sequence[int], slots: int, partition: str) -> dict[str, MicroBatch]:
    everyone, ids = tuple(range(slots)), tuple(range(len(lengths)))
    made = {"one group": MicroBatch((Group(everyone, ids, tuple(lengths), partition=partition),))}
    if len(lengths) > 2:
        first = Group(everyone[: max(1, slots - 1)], ids[:2], tuple(lengths[:2]), partition=partition)
        second = Group((slots - 1,) if slots == 1 else (slots - 1, 0), ids[2:], tuple(lengths[2:]), partition=partition)
        made["two groups"] = MicroBatch((first, second))
    if slots > 1:
        made["padded"] = MicroBatch((Group(everyone, ids, tuple(lengths), pad_to=max(lengths) + 3),))  # in zigzag
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
                    if (quick and shape != "one group") or (shape, partition) == ("padded", "contiguous"):
                        continue
                    shard = bind(batch, world).with_padding()
                    order = [d for group in batch.groups for d in group.documents]
                    lengths = [LENGTHS[name][d] for d in order]
                    for kind in kinds:
                        worst[name, partition, shape, kind] = scan_error(kind, lengths, shard, seed)
                    for width in widths:
                        worst[name, partition, shape, f"convolution {width}"] = conv_error(width, lengths, shard, world)
    return worst


@lru_cache(maxsize=8)
def scanned(kind: str, lengths: tuple[int, ...], seed: int) -> tuple[list[Tensor | None], Tensor, list[Tensor]]:
    """Inputs, what the output owes, and the output with every gradient."""
    given = inputs(kind, sum(lengths), HEADS, SIZE, WIDTH, seed)
    wanted = by_rows(*given, lengths)  # pyright: ignore[reportArgumentType]
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return given, dout, [wanted, *torch.autograd.grad(wanted, [x for x in given if x is not None], dout)]


def scan_error(
    kind: str, lengths: Sequence[int], shard: SequenceShard, seed: int = 0, dtype: torch.dtype = torch.float64
) -> float:
    given, dout, exact = scanned(kind, tuple(lengths), seed)
    leaves = [
        None if x is None else shard.scatter(x.detach().to(shard.rows.device, dtype)).requires_grad_() for x in given
    ]
    out = linear_scan(*leaves, shard)  # pyright: ignore[reportArgumentType]
    (out * shard.scatter(dout.to(out))).sum().backward()
    found = [out, *(x.grad for x in leaves if x is not None)]
    return _worst(found, exact, shard)


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
    errors = []
    for x, whole in zip(found, exact, strict=True):
        rows = shard.rows >= 0
        difference = (x.detach() - shard.scatter(whole.detach().to(x.device)))[rows]
        assert not torch.isnan(difference).any()
        errors.append((difference.norm() / whole.norm().clamp(min=1e-9)).item())
    return max(errors)


FIRST_LENGTHS = (9, 1, 14, 2, 3)
CHANNELS = 300  # of two programs
FIRST_ROWS = tuple(product(("contiguous", "zigzag"), (2, 4, 9), (False, True)))


def first_row_errors(
    partition: str, width: int, extras: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Of first rows of runs behind rows that arrived: errors of outputs and of arrived rows' gradients, at worst.

    `extras`: with a bias and SiLU, of tensors whose channels are not next to each other.
    """
    group = Group((0, 1, 2), tuple(range(len(FIRST_LENGTHS))), FIRST_LENGTHS, partition=partition)  # pyright: ignore
    generator, worst = torch.Generator().manual_seed(0), {"y": 0.0, "owed": 0.0}
    for member in range(3):
        chains = Chains(ShardPart(group, member, member, 0, world_key=-1), device)
        reads, rows = cached_reads(chains, width - 1), int(chains.lengths.sum())
        shapes = (
            (rows, CHANNELS),
            (rows, CHANNELS),
            (sum(reads.fetch.before.receives), CHANNELS),
            (CHANNELS, width),
            (CHANNELS,),
        )
        x, dout, arrived, weight, bias = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
        if not len(arrived):
            continue
        x, dout = ((t.t().contiguous().t() if extras else t) for t in (x, dout))
        found, wanted = list[torch.Tensor](), list[torch.Tensor]()
        for exact, results in ((False, found), (True, wanted)):
            x_, dout_, arrived_, weight_, bias_ = (t.double() if exact else t for t in (x, dout, arrived, weight, bias))
            convolution, y = Convolution(weight_, bias_ if extras else None, extras), torch.zeros_like(x_)
            (TORCH_CONVOLUTION.write_first_outputs if exact else write_first_outputs)(
                y, x_, arrived_, convolution, reads.first
            )
            gradients = (TORCH_CONVOLUTION.arrived_gradients if exact else arrived_gradients)(
                dout_, x_, arrived_, convolution, reads.first
            )
            results += [y, gradients]
        for name, a, b in zip(worst, found, wanted, strict=True):
            worst[name] = max(worst[name], relative_error(a.double(), b))
    return worst


def interpreted() -> None:
    """Our Triton kernels behind rows that arrived, by Triton's interpreter, in float32 beside float64."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    builder: Any = interpreter.InterpreterBuilder

    def with_flags(masked: Any, at: int) -> Any:
        """The interpreter wants masks as bool."""

        def run(*given: Any, **named: Any) -> Any:
            given[at].data = given[at].data.astype(bool)
            return masked(*given, **named)

        return run

    builder.create_masked_load = with_flags(builder.create_masked_load, 2)
    builder.create_masked_store = with_flags(builder.create_masked_store, 3)
    for case in FIRST_ROWS:
        worst = first_row_errors(*case, torch.device("cpu"), torch.float32)
        assert max(worst.values()) <= 1e-6, (case, worst)

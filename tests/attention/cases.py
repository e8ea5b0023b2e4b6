"""Layouts and calls of the parity table, and what one rank does with them."""

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.comm import SequenceShard
from longspan.testing import backend
from tests.reference import dense_attention, relative_error

LIMIT = {"float64": 1e-12, "float32": 1e-5}
HEADS = {"mha": (4, 4, 8, 8), "gqa": (4, 2, 16, 16), "mqa": (3, 1, 8, 8), "mla": (4, 2, 24, 16)}  # N, K, H, Hv
RAGGED = (13, 1, 40, 2, 7)


def micro_batch(*groups: tuple[tuple[int, ...], tuple[int, ...]], **options: Any) -> MicroBatch:
    """Groups given as (slots, lengths), with documents numbered through."""
    ids = itertools.count()
    made = (Group(slots, tuple(next(ids) for _ in lengths), lengths, **options) for slots, lengths in groups)
    return MicroBatch(tuple(made))


def layouts(slots: int) -> dict[str, MicroBatch]:
    """Micro-batches for a home of this many slots: every document split over all of them, and others."""
    everyone = tuple(range(slots))
    found = {
        "ragged": micro_batch((everyone, RAGGED)),
        "even": micro_batch((everyone, (4 * slots, 2 * slots))),
        "contiguous": micro_batch((everyone, RAGGED), partition="contiguous"),
        "padded": micro_batch((everyone, (5, 17, 1)), pad_to=2 * slots + 17),
        "shares without rows": micro_batch((everyone, (1, 1))),
    }
    if slots >= 2:
        found["slots without rows"] = micro_batch((everyone[1:], (9, 4)))
        found["degree 1"] = micro_batch(*(((slot,), (5 + slot, 3)) for slot in everyone))
    if slots >= 4:
        halves = ((0, 1), (11, 5)), ((3, 2), (3, 16))
        found["halves"] = micro_batch(*halves)
        few = ((1,), (6,)), (everyone, (21, 2)), ((3, 1), (1,)), ((3, 1), (14,))  # slot 1 has no row of the third
        found["several groups a slot"] = micro_batch(*few, ((0, 3), (1, 8)), ((2,), (4, 4)), (everyone[1:], (19,)))
    return found


@dataclass(frozen=True)
class Case:
    """One call of attend on one layout, with the seed of its tensors."""

    layout: str
    kind: str
    heads: str
    dtype: str = "float64"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kernel: str | None = None
    padding: int = 0  # rows to pad the shard to
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}


def table(slots: int, *, short: bool = False) -> list[Case]:
    """Every layout × type × mask × head shape in float64, and a cut through the rest."""
    cases = [
        Case(layout, kind, heads, causal=causal)
        for layout, kind in itertools.product(layouts(slots), ("p2p", "all_gather"))
        for heads, causal in itertools.product(("gqa",) if short else ("mha", "gqa", "mqa"), (True, False))
    ]
    for layout, kind in itertools.product(layouts(slots), ("p2p", "all_gather")):
        cases.append(Case(layout, kind, "gqa", "float32"))
        cases.append(Case(layout, kind, "mla", window=5, sinks=True))
        cases.append(Case(layout, kind, "gqa", padding=40))
        if not short:
            cases.append(Case(layout, kind, "mla", "float32", causal=False, sinks=True))
            cases.append(Case(layout, kind, "mha", window=1))
            cases.append(Case(layout, kind, "mqa", softcap=1.5, window=9))
            cases.append(Case(layout, kind, "gqa", kernel="reference"))
    return [replace(case, seed=seed) for seed, case in enumerate(cases)]


def random_cases(slots: int, count: int, seed: int) -> list[Case]:
    """Calls drawn at random."""
    draw = random.Random(seed)
    return [
        Case(
            layout=draw.choice([*layouts(slots)]),
            kind=draw.choice(("p2p", "all_gather")),
            heads=draw.choice([*HEADS]),
            window=draw.choice((None, 1, 2, 7, 30)),
            softcap=draw.choice((None, None, 2.0)),
            sinks=draw.random() < 0.5,
            padding=draw.choice((0, 0, 33)),
            seed=draw.randrange(1 << 30),
        )
        for _ in range(count)
    ]


def tensors(case: Case, rows: int) -> list[Tensor]:
    """q, k, v, dout, sinks in the case's dtype, the same on every rank."""
    n, kv, size, v_size = HEADS[case.heads]
    generator = torch.Generator().manual_seed(case.seed)
    shapes = ((rows, n, size), (rows, kv, size), (rows, kv, v_size), (rows, n, v_size), (n,))
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(getattr(torch, case.dtype)) for x in made]


def wanted(case: Case, lengths: tuple[int, ...]) -> list[Tensor]:
    """out, dq, dk, dv of the packed rows and dsinks, dense and in float64."""
    *qkv, dout, sinks = tensors(case, sum(lengths))
    leaves = [x.double().detach().requires_grad_() for x in (*qkv, sinks)]
    out = dense_attention(*leaves[:3], lengths, sinks=leaves[3] if case.sinks else None, **case.options)
    out.backward(dout.double())
    return [out, *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def found(case: Case, shard: SequenceShard) -> list[Tensor]:
    """out, dq, dk, dv of this rank's rows, and its part of dsinks."""
    *qkv, dout, sinks = (x.to(shard.device) for x in tensors(case, shard.tokens))
    leaves = [x.requires_grad_() for x in (*(shard.scatter(x) for x in qkv), sinks)]
    given = leaves[3] if case.sinks else None
    out = attend(*leaves[:3], shard, sinks=given, cp_comm_type=case.kind, kernel=case.kernel, **case.options)
    out.backward(shard.scatter(dout))
    assert case.sinks == (leaves[3].grad is not None)
    for name, x in zip("qkv", leaves, strict=False):
        assert x.grad is not None, f"no gradient of {name} at {len(x)} rows"
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def worst_error(case: Case, shard: SequenceShard, world: World) -> float:
    """The largest relative error of out and of the gradients, each over the rows of all ranks."""
    *rows, sinks = found(case, shard)
    *full_rows, full_sinks = wanted(case, shard.micro_batch.lengths)
    squares: list[float] = []
    for mine, full in zip(rows, full_rows, strict=True):
        full_local = shard.scatter(full.detach().to(shard.device))
        squares += [(mine.double() - full_local).square().sum().item(), full_local.square().sum().item()]
    sums = world.reduce_sum([*squares, *sinks.tolist()])
    errors = [(sums[i] / (sums[i + 1] or 1.0)) ** 0.5 for i in range(0, len(squares), 2)]
    return max(*errors, relative_error(torch.tensor(sums[len(squares) :], dtype=torch.float64), full_sinks))


def run_cases(rank: int, slots: int, cases: list[Case]) -> list[float]:
    """Worst error of each case; entered by every rank of a world of this many slots."""
    with World(Layout(ranks=slots), backend=backend()) as world:
        bound = {name: bind(batch, world) for name, batch in layouts(slots).items()}
        return [worst_error(case, _padded(bound[case.layout], case.padding), world) for case in cases]


def _padded(shard: SequenceShard, rows: int) -> SequenceShard:
    return shard.with_padding(minimum=rows) if rows else shard

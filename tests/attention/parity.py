"""The parity table of attention: types × degrees × features × packed lengths × head shapes × dtypes.

The whole table runs with `make test-all`; a subset that has every pair of two entries runs always. Each combination is
compared with dense attention in float64: out, dq, dk, dv and the gradient of sinks.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention.all_gather import gather_bytes_per_head
from longspan.comm import SequenceShard
from longspan.errors import AttentionError
from longspan.testing import backend
from tests.attention.cases import dropout_factors
from tests.pairs import drawn_row, every_pair
from tests.reference import dense_attention

DEGREES = (1, 2, 3, 4, 6, 8)
LIMIT = {"float64": 1e-12, "float32": 1e-5}
NOISE = 1e-6  # of float32 sums, where half precision alone has no error: rows that see themselves and nothing else
HEADS = {  # N, K, H, Hv
    "MHA, 24 of 32": (24, 24, 32, 32),
    "GQA, 32/4 of 128": (32, 4, 128, 128),
    "MQA, 24/1 of 64": (24, 1, 64, 64),
    "MLA, 24 of 192/128": (24, 24, 192, 128),
    "GQA, 64/8 of 64": (64, 8, 64, 64),
}
LENGTHS = {
    "one document": (29,),
    "ragged": (9, 1, 14, 2, 3),
    "equal": (8, 8, 8),
    "fewer rows than members": (1, 2, 1),
    "many": (3, 1, 2, 2, 4, 1, 3, 3, 2, 2, 1, 3),
}
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 4},
    "window wider than a share": {"window": 11},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.31},
    "dropout": {"dropout": 0.25},
    "window, sinks": {"window": 7, "sinks": True},
    "full, softcap, dropout, sinks": {"causal": False, "softcap": 2.0, "dropout": 0.1, "sinks": True},
}
WAYS = (
    "p2p",
    "all_gather",
    "all_gather, a head at a time",
    "a2a",
    "a2a+p2p, two inside",
    "a2a+p2p, two outside",
    "a2a+p2p, one inside",
    "a2a+p2p, one outside",
)
DTYPES = ("float64", "float32", "bfloat16")
AXES = (WAYS, DEGREES, tuple(FEATURES), tuple(LENGTHS), tuple(HEADS), DTYPES)
REFUSED = -1.0  # in place of an error: heads that cannot be dealt out, as the combination says


@dataclass(frozen=True)
class Combination:
    """One entry of the table, with the seed of its tensors; prints as what makes it again."""

    way: str
    degree: int
    feature: str
    lengths: str
    heads: str
    dtype: str
    seed: int = 0

    @property
    def dropout(self) -> float:
        return FEATURES[self.feature].get("dropout", 0.0)

    @property
    def mask(self) -> dict[str, Any]:
        """What the dense reference and attend both take."""
        return {k: v for k, v in FEATURES[self.feature].items() if k not in ("sinks", "dropout")}

    @property
    def sinks(self) -> bool:
        return FEATURES[self.feature].get("sinks", False)

    @property
    def kind(self) -> str:
        return self.way.split(",")[0]

    @property
    def sizes(self) -> tuple[int, int] | None:
        """The levels; "two inside" of a degree that two does not divide is "one outside"."""
        if self.kind != "a2a+p2p":
            return None
        two = 2 if self.degree % 2 == 0 else self.degree
        inner = {"two inside": two, "two outside": self.degree // two, "one inside": 1, "one outside": self.degree}
        first = inner[self.way.split(", ")[1]]
        return first, self.degree // first

    @property
    def is_refused(self) -> bool:
        """Whether the query heads cannot be dealt to those who exchange heads for rows."""
        inner = self.degree if self.kind == "a2a" else self.sizes[0] if self.sizes else 1
        return HEADS[self.heads][0] % inner != 0


def whole(degree: int) -> list[Combination]:
    """Every combination at a degree; those of equal tensors follow each other."""
    others = itertools.product(FEATURES, LENGTHS, HEADS, DTYPES)
    return [
        Combination(way, degree, *other, seed=seed)
        for seed, other in enumerate(others)
        for way in WAYS
        if not _is_repeated(way, degree)
    ]


def _is_repeated(way: str, degree: int) -> bool:
    """Levels that another way already has at this degree, and types of a single member."""
    before = WAYS[: WAYS.index(way)]
    here = Combination(way, degree, "causal", "equal", "MHA, 24 of 32", "float64")
    same = (Combination(w, degree, "causal", "equal", "MHA, 24 of 32", "float64") for w in before)
    return here.sizes is not None and any(here.sizes == other.sizes for other in same)


def pairwise(seed: int) -> list[Combination]:
    """Combinations in which every two entries of two axes meet."""
    return [Combination(*values, seed=i) for i, values in enumerate(every_pair(AXES, seed))]


def drawn(count: int, seed: int) -> list[Combination]:
    """Combinations of the table at random, at degrees up to 4, in exact dtypes, with lengths of their own."""
    draw = random.Random(seed)
    combinations = (drawn_row(draw, AXES, {1: draw.choice((2, 3, 4)), 5: "float64"}) for _ in range(count))
    return [Combination(*values, seed=draw.randrange(1 << 30)) for values in combinations]


@cache
def _numbers() -> Tensor:
    return torch.randn(1 << 21, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tensors(combination: Combination) -> list[Tensor]:
    """q, k, v, dout in the combination's dtype, and sinks in one that sums; the same on every rank."""
    n, kv, size, v_size = HEADS[combination.heads]
    rows, dtype = sum(LENGTHS[combination.lengths]), getattr(torch, combination.dtype)
    at, made = combination.seed * 7919 % 499_979, list[Tensor]()
    for shape in ((rows, n, size), (rows, kv, size), (rows, kv, v_size), (rows, n, v_size), (n,)):
        made.append(_numbers()[at : at + math.prod(shape)].view(shape))  # drawing them anew takes longer than attention
        at += math.prod(shape)
    *made, sinks = made
    return [*(x.to(dtype) for x in made), sinks.to(torch.float32 if dtype == torch.bfloat16 else dtype, copy=True)]


def _without_way(combination: Combination) -> Combination:
    """What dense attention depends on, as a key."""
    c = combination
    return Combination("p2p", 1, c.feature, c.lengths, c.heads, c.dtype, c.seed)


@lru_cache(maxsize=2)
def _dense(combination: Combination) -> list[Tensor]:
    """out, dq, dk, dv, dsinks in float64."""
    *qkv, dout, sinks = tensors(combination)
    leaves = [x.double().requires_grad_() for x in (*qkv, sinks)]
    sink_option = {"sinks": leaves[3] if combination.sinks else None}
    factors = dropout_factors(combination) if combination.dropout else None  # pyright: ignore[reportArgumentType]
    out = dense_attention(*leaves[:3], LENGTHS[combination.lengths], factors=factors, **sink_option, **combination.mask)
    out.backward(dout.double())
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def wanted(combination: Combination) -> list[Tensor]:
    """The same, whatever the way."""
    return _dense(_without_way(combination))


def batch_of(combination: Combination, members: tuple[int, ...], sizes: tuple[int, int] | None) -> MicroBatch:
    lengths = LENGTHS[combination.lengths]
    group = Group(members, tuple(range(len(lengths))), lengths, hierarchical_context_parallel_sizes=sizes)
    return MicroBatch((group,))


def computed(combination: Combination, shard: SequenceShard) -> list[Tensor]:
    """out, dq, dk, dv of the rows here, and this rank's part of dsinks."""
    *qkv, dout, sinks = (x.to(shard.device) for x in tensors(combination))
    leaves = [x.requires_grad_() for x in (*(shard.scatter(x) for x in qkv), sinks)]
    options: dict[str, Any] = {"cp_comm_type": combination.kind, **combination.mask}
    if "a head" in combination.way:
        options["max_gather_bytes"] = gather_bytes_per_head(shard.tokens, leaves[1], leaves[2])
    if combination.sinks:
        options["sinks"] = leaves[3]
    out = attend(*leaves[:3], shard, dropout=combination.dropout, dropout_seed=combination.seed, **options)
    out.backward(shard.scatter(dout))
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def _squares(combination: Combination, shard: SequenceShard) -> list[float]:
    """Sums of squares of the errors of out, dq, dk, dv here, and this rank's part of dsinks."""
    *rows, sinks = computed(combination, shard)
    pairs = zip(rows, wanted(combination), strict=False)
    errors = ((mine.double() - shard.scatter(full.to(shard.device))).square().sum().item() for mine, full in pairs)
    return [*errors, *sinks.tolist()]


def _relative(squares: list[float], combination: Combination) -> list[float]:
    """Relative errors of out, dq, dk, dv and dsinks from the sums over ranks."""
    *full, sinks = wanted(combination)
    errors = [s**0.5 / (x.norm().item() or 1.0) for s, x in zip(squares, full, strict=False)]
    off = torch.tensor(squares[4:], dtype=torch.float64) - sinks
    return [*errors, off.norm().item() / (sinks.norm().item() or 1.0)]


@lru_cache(maxsize=2)
def _alone(combination: Combination, slot: int, world_key: int, device: torch.device) -> list[float]:
    """The errors of the same kernel on whole documents in one process, in half precision."""
    shard = SequenceShard(batch_of(combination, (slot,), None), slot, world_key, device)
    return _relative(_squares(combination, shard), combination)


def run(rank: int, degree: int, combinations: list[Combination]) -> list[float]:
    """The error of each combination over its limit, so that 1 is the most; REFUSED where it is refused, as it says."""
    torch.set_num_threads(1)  # these are small tensors
    with World(Layout(ranks=degree), backend=backend()) as world:
        return list(_run_in_pieces(world, combinations))


def _run_in_pieces(world: World, combinations: list[Combination]) -> Iterator[float]:
    for start in range(0, len(combinations), 64):
        piece = combinations[start : start + 64]
        mine = [_attempt(world, combination) for combination in piece]
        flat = iter(world.control.sum_over_slots([x for squares in mine for x in squares]))
        for combination, squares in zip(piece, mine, strict=True):
            summed = [next(flat) for _ in squares]
            yield _over_limit(combination, summed, world) if summed else REFUSED


def _attempt(world: World, combination: Combination) -> list[float]:
    members = tuple(range(world.home.slots))
    shard = bind(batch_of(combination, members, combination.sizes), world)
    if not combination.is_refused:
        return _squares(combination, shard)
    try:
        computed(combination, shard)
    except AttentionError as error:
        assert "query heads cannot be dealt to the" in str(error), error
        return []
    raise AssertionError(f"{combination} was not refused")


def _over_limit(combination: Combination, squares: list[float], world: World) -> float:
    errors = _relative(squares, combination)
    if combination.dtype in LIMIT:
        return max(errors) / LIMIT[combination.dtype]
    alone = _alone(_without_way(combination), world.slot, world.key, world.device)
    return max(error / (2 * one + NOISE) for error, one in zip(errors, alone, strict=True))


def by_degree(combinations: Iterable[Combination]) -> dict[int, list[Combination]]:
    """Combinations by degree, those of equal tensors beside each other."""
    of_degree: dict[int, list[Combination]] = {}
    for combination in combinations:
        of_degree.setdefault(combination.degree, []).append(combination)
    return of_degree

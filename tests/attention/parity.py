"""The parity table of attention: types × degrees × features × packed lengths × head shapes × dtypes.

The whole table runs with `make test-all`; a subset that has every pair of two entries runs always. Each combination is
compared with dense attention in float64: out, dq, dk, dv and the gradient of sinks.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from longspan import Group, Layout, MicroBatch, World, bind
from longspan.comm import SequenceShard
from longspan.errors import AttentionError
from longspan.testing import backend
from tests.attention.cases import (
    LIMIT,
    Case,
    Question,
    Way,
    errors_over_ranks,
    found,
    heads_of,
    relative_errors,
    squares_of,
    wanted,
)
from tests.pairs import every_pair

DEGREES = (1, 2, 3, 4, 6, 8)
NOISE = 1e-6  # of float32 sums, where half precision alone has no error: rows that see themselves and nothing else
HEADS = ("MHA, 24 of 32", "GQA, 32/4 of 128", "MQA, 24/1 of 64", "MLA, 24 of 192/128", "GQA, 64/8 of 64")
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
AXES = (WAYS, DEGREES, tuple(FEATURES), tuple(LENGTHS), HEADS, DTYPES)
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
    def case(self) -> Case:
        question = Question(self.lengths, self.heads, self.dtype, seed=self.seed, **FEATURES[self.feature])
        return question, Way(self.kind, heads_at_once=1 if "a head" in self.way else None)

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
        inner = self.degree if self.kind == "a2a" else self.sizes[0] if self.sizes else 1
        return heads_of(self.heads, 1)[0] % inner != 0


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
    before = WAYS[: WAYS.index(way)]
    here = Combination(way, degree, "causal", "equal", "MHA, 24 of 32", "float64")
    same = (Combination(w, degree, "causal", "equal", "MHA, 24 of 32", "float64") for w in before)
    return here.sizes is not None and any(here.sizes == other.sizes for other in same)


def pairwise(seed: int) -> list[Combination]:
    return [Combination(*values, seed=i) for i, values in enumerate(every_pair(AXES, seed))]


def batch_of(combination: Combination, members: tuple[int, ...], sizes: tuple[int, int] | None) -> MicroBatch:
    lengths = LENGTHS[combination.lengths]
    group = Group(members, tuple(range(len(lengths))), lengths, hierarchical_context_parallel_sizes=sizes)
    return MicroBatch((group,))


@lru_cache(maxsize=2)
def _alone(combination: Combination, slot: int, key: int, device: torch.device) -> list[float]:
    shard, case = SequenceShard(batch_of(combination, (slot,), None), slot, key, device), combination.case
    return relative_errors(squares_of(case, 1, shard), wanted(case[0], 1, shard.micro_batch.lengths)[-1])


def run(rank: int, degree: int, combinations: list[Combination]) -> list[float]:
    """The error of each combination over its limit, so that 1 is the most; REFUSED where it is refused, as it says."""
    torch.set_num_threads(1)  # these are small tensors
    with World(Layout(ranks=degree), backend=backend()) as world:
        return list(_run_in_pieces(world, combinations))


def _run_in_pieces(world: World, combinations: list[Combination]) -> Iterator[float]:
    for start in range(0, len(combinations), 64):
        piece = combinations[start : start + 64]
        shards = [bind(batch_of(c, tuple(range(world.home.slots)), c.sizes), world) for c in piece]
        taken = [(c.case, shard) for c, shard in zip(piece, shards, strict=True) if not _refusal(c, shard)]
        errors = iter(errors_over_ranks(taken, 1, world))
        for combination in piece:
            yield REFUSED if combination.is_refused else _over_limit(combination, next(errors), world)


def _refusal(combination: Combination, shard: SequenceShard) -> bool:
    if combination.is_refused:
        with pytest.raises(AttentionError, match="query heads cannot be dealt to the"):
            found(combination.case, 1, shard)
    return combination.is_refused


def _over_limit(combination: Combination, errors: list[float], world: World) -> float:
    if combination.dtype in LIMIT:
        return max(errors) / LIMIT[combination.dtype]
    alone = _alone(replace(combination, way="p2p", degree=1), world.slot, world.key, world.device)
    return max(error / (2 * one + NOISE) for error, one in zip(errors, alone, strict=True))


def by_degree(combinations: Iterable[Combination]) -> dict[int, list[Combination]]:
    of_degree: dict[int, list[Combination]] = {}
    for combination in combinations:
        of_degree.setdefault(combination.degree, []).append(combination)
    return of_degree

"""Rows between unlike layouts are the same bits, their gradients the dense sums, and no rank receives one too many."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan import Bridge, Layout, Partition, World
from longspan.bridge.bridge import RowGradient, _planned_exchange as planned_exchange
from longspan.comm.channel import Channel, Handle
from longspan.errors import LayoutError
from longspan.testing import backend, run_ranks
from tests.layout.strategies import lacking, random_gradients, summed
from tests.mutation import Change, mutated

Lists = list[list[int]]
ITEMS = (5, 1, 7, 2, 4, 9, 3, 6)  # rows of each image


class Case(NamedTuple):
    """What ranks of a home have and need, by rank, and what the gradients of the copies of a row are."""

    home: Layout
    have: Lists
    need: Lists
    gradient: RowGradient

    def partition(self, rows: Lists) -> Partition:
        return Partition.from_rows([rows[rank] for rank in self.home.ranks])

    @property
    def groups(self) -> Lists:
        """Ranks that carry the same gradient of a row; those of one rank are summed, and those of groups."""
        if self.gradient == "partial":
            return [[rank] for rank in self.home.ranks]
        if self.gradient == "partial_over_slots":
            return [sorted(ranks) for ranks in self.home.tp_groups()]
        return [sorted(self.home.ranks)]


def encoder_rows(layout: Layout, *, split: bool = False) -> Lists:
    """Image i is encoded by slot i mod slots; its rows are on all ranks of the slot, or split over them."""
    starts = np.cumsum((0, *ITEMS))
    have: Lists = [[] for _ in layout.ranks]
    for item, (start, stop) in enumerate(pairwise(starts)):
        for tp in range(layout.tp):
            rows = range(start, stop)[tp :: layout.tp] if split else range(start, stop)
            have[layout.rank_at(item % layout.slots, tp=tp)] += map(int, rows)
    return have


def zigzag(rows: list[int], cp: int) -> Lists:
    shares = Partition.zigzag([len(rows)], cp)
    return [[rows[i] for i in shares.rows(member)] for member in range(cp)]


def contiguous(rows: list[int], cp: int) -> Lists:
    return [part.tolist() for part in np.array_split(np.array(rows, dtype=np.int64), cp)]


def random(rows: list[int], cp: int) -> Lists:
    order = np.random.default_rng(len(rows)).permutation(rows)
    return [part.tolist() for part in np.array_split(order, cp)]


def language_model_rows(
    home: Layout,
    cp: int,
    owner: Callable[[list[int], int], Lists],
    *,
    split: bool = False,
    shared: int = 0,
    repeated: int = 0,
    stage: int = 0,
) -> Lists:
    """A replica of cp slots has the documents of every dp-th image, whose rows its slots own.

    `split`: each tensor-parallel rank needs its part of a slot's rows (sequence parallelism). So many rows are
    `shared` by all slots, and each slot needs so many rows of its own `repeated`.
    """
    dp, starts = home.slots // cp, np.cumsum((0, *ITEMS))
    need: Lists = [[] for _ in home.ranks]
    for replica in range(dp):
        items = range(replica, len(ITEMS), dp)
        rows = [row for item in items for row in range(int(starts[item]), int(starts[item + 1]))]
        for member, part in enumerate(owner(rows, cp)):
            part += [row for row in range(shared) if row not in part] + part[:repeated]
            for tp in range(home.tp):
                part_here = part[tp :: home.tp] if split else part
                need[home.rank_at(replica * cp + member, tp=tp, pp=stage)] = list(part_here)
    return need


ONE, TP2, TP3, TWO_STAGES = Layout(6), Layout(6, tp=2), Layout(6, tp=3), Layout(6, pp=3, tp=2)
BACKWARDS = Layout((5, 3, 1, 4, 2, 0), tp=2)
CASES = {
    "2·3 to 3·1·2, two slots use a row": Case(
        TP3, encoder_rows(TP2), language_model_rows(TP3, 1, contiguous, shared=4), "partial_over_slots"
    ),
    "3·2 to 2·1·3, a slot uses a row twice": Case(
        TP2, encoder_rows(TP3), language_model_rows(TP2, 1, random, repeated=3), "partial_over_slots"
    ),
    "1·6 to 2·3·1, sequence parallel": Case(
        TP2, encoder_rows(ONE), language_model_rows(TP2, 3, zigzag, split=True), "partial_over_slots"
    ),
    "3·2 split over its ranks to 3·2·1": Case(
        TP3, encoder_rows(TP3, split=True), language_model_rows(TP3, 2, zigzag), "partial_over_slots"
    ),
    "6·1 to 1·2·3, repeated": Case(
        ONE, encoder_rows(Layout(6, tp=6)), language_model_rows(ONE, 2, random, repeated=2, shared=3), "partial"
    ),
    "3·2 to copies of all rows": Case(ONE, encoder_rows(TP3), [list(range(20))] * 6, "identical"),
    "frozen, 2·3 to 3·2·1": Case(TP3, encoder_rows(TP2), language_model_rows(TP3, 2, contiguous), "none"),
    "1·6 to the second of three stages": Case(
        TWO_STAGES, encoder_rows(ONE), language_model_rows(TWO_STAGES, 1, zigzag, stage=1), "partial_over_slots"
    ),
    "ranks in another order": Case(
        BACKWARDS, encoder_rows(TP2), language_model_rows(BACKWARDS, 3, zigzag, shared=2), "partial_over_slots"
    ),
    "one rank has, another needs": Case(
        TP2, [[], [4, 3, 9], [], [], [], []], [[], [], [], [], [9], [9]], "partial_over_slots"
    ),
}
WIDTH = 3
SCALES = 2.0 ** torch.arange(WIDTH, dtype=torch.float64)  # of columns of a gradient: products with them are exact


def coded(rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 1) * 16 + torch.arange(WIDTH)


def gradients_of(case: Case) -> list[np.ndarray]:
    """A number for every copy, by rank: the same for those copies whose gradient is the same."""
    group_of = {rank: index for index, ranks in enumerate(case.groups) for rank in ranks}
    alike = case.gradient == "identical"
    return random_gradients(case.need, lambda rank, row, number: (group_of[rank], row, 0 if alike else number))


def expected_gradient(case: Case, rank: int) -> Tensor:
    need, gradients = case.need, gradients_of(case)
    if case.gradient == "identical":
        first = [[rows.index(row) == place for place, row in enumerate(rows)] for rows in need]
        gradients = [
            numbers[np.array(is_first, dtype=bool)] for numbers, is_first in zip(gradients, first, strict=True)
        ]
        need = [list(dict.fromkeys(rows)) for rows in need]
    sums = torch.tensor(summed(case.have, need, gradients, case.groups)[rank], dtype=torch.float64)
    return sums.reshape(-1, 1) * SCALES


def wrong(rank: int, case: Case, world: World) -> list[str]:
    device, errors = world.device, list[str]()
    bridge = Bridge(case.partition(case.have), case.partition(case.need), world, gradient=case.gradient)
    x = coded(case.have[rank]).to(device).requires_grad_(case.gradient != "none")
    with recorded_receives(world.channels.everyone) as received:
        y = bridge(x)
        there = sum(received)
        if not torch.equal(y.detach().cpu(), coded(case.need[rank])):
            errors.append(f"{y} arrived instead of {case.need[rank]}")
        if case.gradient != "none":
            y.backward((torch.from_numpy(gradients_of(case)[rank]).reshape(-1, 1) * SCALES).to(device))
            expected = expected_gradient(case, rank)
            if x.grad is None or not torch.equal(x.grad.cpu(), expected):
                errors.append(f"the gradient is {x.grad} instead of {expected}")
    back = 0 if case.gradient == "none" else lacking(case.have, case.need, case.groups, rank)
    bounds = bridge.exchange.lower_bound_rows(world.home.ranks.index(rank)), back
    if (there, sum(received) - there) != bounds or bridge.received_rows != bounds:
        errors.append(f"{received} and {bridge.received_rows} rows were received instead of {bounds}")
    return errors


@contextlib.contextmanager
def recorded_receives(channel: Channel) -> Iterator[list[int]]:
    """How many rows each exchange of this channel is to receive from other members."""
    received, exchange = list[int](), channel.exchange_runs

    def record(x: Tensor, sends: Sequence[int], into: Tensor, receives: Sequence[int], what: str) -> Handle:
        assert len(into) == sum(receives) and len(x) == sum(sends) and not sends[channel.index]
        assert what in ("row exchange", "row gradients"), "what an error names"
        received.append(sum(receives))
        return exchange(x, sends, into, receives, what)

    with patch.object(channel, "exchange_runs", record):
        yield received


def all_wrong(rank: int, names: list[str]) -> list[str]:
    errors = list[str]()
    for home in dict.fromkeys(CASES[name].home for name in names):
        with World(home, backend=backend(), timeout=60) as world:
            for name in (name for name in names if CASES[name].home == home):
                errors += [f"{name}, rank {rank}: {error}" for error in wrong(rank, CASES[name], world)]
            if world.plane != home.ranks:
                assert [record.kind for record in world.process_groups.made].count("everyone") == 1
    return errors


def test_rows_are_the_same_bits_and_gradients_the_dense_sums() -> None:
    errors = [error for errors in run_ranks(all_wrong, 6, list(CASES)) for error in errors]
    assert not errors, "\n".join(errors)


# ---- the table would tell: with one term of the bridge changed, on every rank, some rank is wrong about some case

NAMES = [  # in which rows are used by several slots, several times, in every order, and by nobody
    "2·3 to 3·1·2, two slots use a row",
    "ranks in another order",
    "3·2 to 2·1·3, a slot uses a row twice",
    "1·6 to 2·3·1, sequence parallel",
    "6·1 to 1·2·3, repeated",
    "3·2 to copies of all rows",
]
OF_SLOTS = '"partial_over_slots": [tuple(members) for members in slots]'
MUTATIONS = [
    # the sum over uses of a row: by several slots, by one rank, one slot's twice
    ("bridge.bridge", "total.index_add_(0, target, widen_half_precision(buffer[source]))", "pass"),
    ("bridge.bridge", "x.index_add_(0, target, x[source])", "pass"),
    (
        "bridge.bridge",
        "widen_half_precision(buffer[source])",
        "widen_half_precision(rows[moves.summed_rows[target]])",
    ),
    ("layout.exchange", "for group in groups for member", "for group in reversed(groups) for member"),
    # conventions
    ("bridge.bridge", OF_SLOTS, '"partial_over_slots": None'),
    ("bridge.bridge", OF_SLOTS, '"partial_over_slots": [[member] for member in range(channel.degree)]'),
    ("bridge.bridge", '"identical": None', '"identical": [[member] for member in range(channel.degree)]'),
    # axes and order of the home
    ("bridge.bridge", "world.home.tp_groups()", "zip(*world.home.tp_groups())"),
    ("bridge.bridge", "everyone.ranks.index(rank)", "rank"),
    # rows where they belong
    ("layout.exchange", "blocks[np.argsort(order[blocks])]", "np.sort(blocks)"),
    ("layout.exchange", "pool_begins[me] = pool_rows.sum()", "pool_begins[me] = 0"),
    ("bridge.bridge", "buffer[moves.places]", "buffer[moves.places.flip(0)]"),
    ("bridge.bridge", "(x, [stays],", "(x, [stays.flip(0)],"),
    ("bridge.bridge", "buffer[-1:].zero_()", "buffer[-1:].fill_(1)"),
    # what arrives in one piece, and what leaves in one
    ("bridge.bridge", "not np.array_equal(moves.places[run], np.arange(arriving))", "False"),
    ("bridge.bridge", "moves.stays[start:])", "moves.stays[: end - stop])"),
    ("bridge.bridge", "np.array_equal(rows, np", "np.array_equal(np.sort(rows), np"),
    (
        "bridge.bridge",
        "rows.index_copy_(0, moves.summed_rows,",
        "rows.index_copy_(0, moves.summed_rows.flip(0),",
    ),
]

DAILY = (MUTATIONS[0], MUTATIONS[4], MUTATIONS[11])  # a term, a convention and an order


def noticed(rank: int, names: Sequence[str], mutations: Sequence[Change]) -> list[bool]:
    answers = [False] * (1 + len(mutations))
    for home in dict.fromkeys(CASES[name].home for name in names):
        with World(home, backend=backend(), timeout=60) as world:
            cases = [CASES[name] for name in names if CASES[name].home == home]
            for index, mutation in enumerate((None, *mutations)):
                with mutated(mutation):
                    errors = [errs(rank, case, world) for case in cases]  # every rank runs all of them
                    answers[index] |= any(errors)
    return answers


def errs(rank: int, case: Case, world: World) -> bool:
    planned_exchange.cache_clear()
    try:
        return bool(wrong(rank, case, world))
    except LayoutError:
        return True


@pytest.mark.parametrize(
    ("names", "mutations"),
    [pytest.param(NAMES[:1], DAILY, id="daily"), pytest.param(NAMES, MUTATIONS, id="all", marks=pytest.mark.whole)],
)
def test_every_change_is_noticed(names: Sequence[str], mutations: Sequence[Change]) -> None:
    of_ranks = run_ranks(noticed, 6, names, mutations, timeout=240)
    answers = [any(answers) for answers in zip(*of_ranks, strict=True)]
    assert not answers[0]
    survivors = [mutation for mutation, seen in zip(mutations, answers[1:], strict=True) if not seen]
    assert not survivors, "\n".join(map(str, survivors))

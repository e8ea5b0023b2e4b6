"""The table of layouts would tell: with one term of the bridge changed, some rank is wrong about some case.

Every rank changes the same line, runs the cases, and puts the line back.
"""

from collections.abc import Sequence

import pytest

from longspan import World
from longspan.bridge import bridge
from longspan.errors import LayoutError
from longspan.testing import backend, run_ranks
from tests.bridge.test_bridge import CASES, Case, wrong
from tests.mutation import Change, mutated

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
    ("bridge.bridge", "total.index_add_(0, target, widen_half_precision(pool[source]))", "pass"),
    ("bridge.bridge", "x.index_add_(0, target, x[source])", "pass"),
    (
        "bridge.bridge",
        "widen_half_precision(pool[source])",
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
    ("bridge.bridge", "pool[moves.places]", "pool[moves.places.flip(0)]"),
    ("bridge.bridge", "(x, [moves.stays],", "(x, [moves.stays.flip(0)],"),
    ("bridge.bridge", "pool[-1:].zero_()", "pool[-1:].fill_(1)"),
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
    bridge._planned_exchange.cache_clear()
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

"""The parity table: every pair of its entries always, every combination in `make test-all`, and drawn ones."""

import itertools
import os
import random
from collections.abc import Callable

import pytest

from longspan.testing import run_ranks
from tests.attention.parity import AXES, DEGREES, REFUSED, Combination, by_degree, drawn, pairwise, run, whole
from tests.attention.test_attend import needs

PAIRS = by_degree(pairwise(seed=0))
SEED = int(os.environ.get("LONGSPAN_TEST_SEED", random.SystemRandom().randrange(1 << 20)))


def check(degree: int, combinations: list[Combination], *, timeout: float = 280) -> list[float]:
    needs(degree)
    of_ranks = run_ranks(run, degree, degree, combinations, timeout=timeout)
    assert of_ranks == [of_ranks[0]] * degree
    wrong = [(c, e) for c, e in zip(combinations, of_ranks[0], strict=True) if not e <= 1]
    assert not wrong, f"{len(wrong)} of {len(combinations)}, error over its limit:\n" + "\n".join(
        f"{error:.2g} {combination}" for combination, error in wrong
    )
    return of_ranks[0]


def test_pairs_are_all_there() -> None:
    values = [(c.way, c.degree, c.feature, c.lengths, c.heads, c.dtype) for cases in PAIRS.values() for c in cases]
    for i, j in itertools.combinations(range(len(AXES)), 2):
        assert {(v[i], v[j]) for v in values} == set(itertools.product(AXES[i], AXES[j])), (i, j)
    assert len(values) < 2 * max(len(a) * len(b) for a, b in itertools.combinations(AXES, 2))


@pytest.mark.parametrize("degree", DEGREES)
def test_every_pair_of_the_table(degree: int) -> None:
    check(degree, PAIRS[degree])


@pytest.mark.whole
def test_combinations_drawn_at_random() -> None:
    print(f"LONGSPAN_TEST_SEED={SEED}")
    for degree, combinations in by_degree(drawn(16, SEED)).items():
        try:
            check(degree, combinations)
        except AssertionError as error:
            error.add_note(f"again with LONGSPAN_TEST_SEED={SEED}")
            raise


@pytest.mark.whole
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("degree", DEGREES)
def test_the_whole_table(degree: int) -> None:
    combinations = whole(degree)
    wrong = check(degree, combinations, timeout=7000)
    refused = sum(error == REFUSED for error in wrong)
    print(
        f"degree {degree}: {len(wrong) - refused} combinations, {refused} refused, worst {max(wrong):.2g} of its limit"
    )


WAYS_TO_BREAK: list[tuple[str, Callable[[Combination], bool]]] = [
    ("heads that divide are computed", lambda c: not c.is_refused),
    ("heads that do not are refused", lambda c: c.is_refused),
]


@pytest.mark.parametrize(("what", "chosen"), WAYS_TO_BREAK, ids=[what for what, _ in WAYS_TO_BREAK])
def test_the_table_has_both(what: str, chosen: Callable[[Combination], bool]) -> None:
    assert any(chosen(c) for cases in PAIRS.values() for c in cases)

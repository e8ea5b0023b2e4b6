"""Each check of the zoo passes here, and fails with the other system's error in our source; the page says the same.

`make test` puts every sixth error in, `make test-all` all of them.
"""

from itertools import groupby
from pathlib import Path

import pytest

from longspan import World
from longspan.errors import LongspanError
from longspan.testing import run_ranks
from tests.zoo import GROUPS, KNOWN_ERRORS, LIMIT
from tests.zoo.known_error import RANKS, KnownError
from tests.zoo.mutations import MUTATIONS, with_error
from tests.zoo.page import zoo_page

NOTICED = 1000 * LIMIT
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"


def measure_error(known: KnownError, world: World) -> float:
    """The worst relative error that a check finds on any rank; infinite for one that is no number."""
    errors = world.control.gather_objects(known.check(world), "errors of a check")
    return max(error if error == error else float("inf") for error in errors)


def _both_errors(rank: int, title: str, mutated: set[str]) -> dict[str, tuple[float, float]]:
    """The error of each check of a group as our source is, and, of those named, with the other system's error in it."""
    errors = dict[str, tuple[float, float]]()
    for home, group in groupby(GROUPS[title], key=lambda known: known.home):
        for known in group:
            with World(home, backend="gloo", timeout=30) as world:
                clean = measure_error(known, world)
                errors[known.name] = clean, float("inf")
                if known.name not in mutated:
                    continue
                with with_error(known.name):
                    try:
                        errors[known.name] = clean, measure_error(known, world)
                    except LongspanError:  # the step is refused on every rank: it counted other targets, say
                        errors[known.name] = clean, float("inf")
    return errors


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("title", GROUPS)
def test_a_check_passes_and_notices_the_error(title: str, every: int) -> None:
    mutated = {known.name for known in GROUPS[title][::every]}
    for errors in run_ranks(_both_errors, RANKS, title, mutated):
        assert set(errors) == {known.name for known in GROUPS[title]}
        for name, (clean, wrong) in errors.items():
            assert clean <= LIMIT, f"{name}: {clean}"
            assert wrong > NOTICED, f"{name}: {wrong} with the error in our source"


def test_every_error_has_a_mutation_and_a_thread_of_its_own() -> None:
    names = [known.name for known in KNOWN_ERRORS]
    assert len(names) == len(set(names)) >= 25
    assert set(names) == {*MUTATIONS, "offsets of 32 bits"}
    assert len({known.thread for known in KNOWN_ERRORS}) == len(names)


def test_the_page_is_made_from_the_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == zoo_page(), "run: python -m tests.zoo.page docs/zoo.md"

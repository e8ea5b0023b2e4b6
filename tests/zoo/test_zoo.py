"""Each check of the zoo passes here, and fails with the other system's error in our source; the page names the same.

`make test` takes the first error of each group, `make test-all` all of them.
"""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from longspan import World
from longspan.doctor.stock import compute_in_float64
from longspan.errors import LongspanError
from longspan.testing import run_ranks
from tests.mutation import mutated
from tests.zoo import checks
from tests.zoo.known_errors import GROUPS, KNOWN_ERRORS, KnownError

LIMIT = 1e-10  # of every check's relative error: all of them compute in float64, or compare integers
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"


def measure_error(known: KnownError, world: World) -> float:
    """The worst relative error that a check finds on any rank; infinite for one that is no number."""
    with compute_in_float64():
        errors = world.control.gather_objects(known.check(world), "errors of a check")
    return max(error if error == error else float("inf") for error in errors)


def _clean_and_changed(rank: int, names: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of these checks with the source as it is, where one home is one world, and with the changes in it."""
    clean, changed = dict[str, float](), dict[str, float]()
    for home in dict.fromkeys(KNOWN_ERRORS[name].home for name in names):
        with World(home, backend="gloo", timeout=30) as world:
            of_home = (name for name in names if KNOWN_ERRORS[name].home == home)
            clean |= {name: measure_error(KNOWN_ERRORS[name], world) for name in of_home}
    narrow = {kernel: source.replace("tl.int64", "tl.int32") for kernel, source in checks.kernel_sources().items()}
    for name in names:
        known = KNOWN_ERRORS[name]
        change = (known.module, known.old, known.new) if known.module else None
        sources = nullcontext() if change else patch.object(checks, "kernel_sources", lambda: narrow)
        with World(known.home, backend="gloo", timeout=30) as world, sources, mutated(change):
            try:
                changed[name] = measure_error(known, world)
            except LongspanError:  # the step is refused on every rank: it counted other targets, say
                changed[name] = float("inf")
    return clean, changed


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_a_check_passes_and_notices_the_error(every: bool) -> None:
    names = [*KNOWN_ERRORS] if every else [next(iter(group)) for group in GROUPS.values()]
    for clean, changed in run_ranks(_clean_and_changed, 2, names):
        assert len(clean) == len(names) and max(clean.values()) <= LIMIT, clean
        assert len(changed) == len(names) and min(changed.values()) > 1000 * LIMIT, changed


def test_the_page_has_every_error_with_a_thread_of_its_own() -> None:
    page = PAGE.read_text(encoding="utf-8")
    titles = [(title, [name[0].upper() + name[1:] for name in group]) for title, group in GROUPS.items()]
    groups = [part.partition("\n") for part in re.split(r"^## ", page, flags=re.M)[1:]]
    assert [(title, re.findall(r"^### (.*)$", text, re.M)) for title, _, text in groups] == titles
    entry = r"^- Thread: \[(\S+)#(\d+)\]\(https://github.com/\1/(?:issues|pull)/\2\)\n"
    threads = re.findall(entry + r"- What happened: .+\n- How it is seen: .+\n- Why not here: .+$", page, re.M)
    assert len({*threads}) == len(threads) == len(KNOWN_ERRORS) and f"lists {len(threads)} errors" in page

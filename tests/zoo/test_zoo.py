"""Each check of the zoo passes here, and fails with the other system's error in our source; the page says the same.

`make test` puts every sixth error in, `make test-all` all of them.
"""

import json
from itertools import groupby
from pathlib import Path

import pytest

from longspan import World
from longspan.cli.doctor_zoo import zoo_text
from longspan.cli.main import main
from longspan.doctor.zoo import GROUPS, KNOWN_ERRORS, LIMIT
from longspan.doctor.zoo.known_error import RANKS
from longspan.doctor.zoo.page import zoo_page
from longspan.doctor.zoo.run import ZooResult, measure_error, run_zoo
from longspan.errors import LongspanError
from longspan.testing import run_ranks
from tests.zoo.mutations import MUTATIONS, with_error

NOTICED = 1000 * LIMIT
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"


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
    assert PAGE.read_text(encoding="utf-8") == zoo_page(), "run: python -m longspan.doctor.zoo.page docs/zoo.md"


QUICK = [n for n, known in enumerate(KNOWN_ERRORS) if known.name in ("offsets of 32 bits", "epochs times the degree")]


def test_results_of_some_checks() -> None:
    results = run_zoo(QUICK)
    assert [result.known for result in results] == [KNOWN_ERRORS[n] for n in QUICK]
    assert all(result.good and result.seconds > 0 for result in results)
    assert "all 2 checks pass" in zoo_text(results, 1.0)


def test_a_failure_is_shown_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [ZooResult(KNOWN_ERRORS[0], 1e-15, 0.5), ZooResult(KNOWN_ERRORS[1], float("inf"), 0.5)]
    results.append(ZooResult(KNOWN_ERRORS[2], None, 0.0, "CommError: a rank was lost"))
    monkeypatch.setattr("longspan.cli.doctor_zoo.run_zoo", lambda timeout: results)
    assert main(["doctor", "--zoo"]) == 1
    text = capsys.readouterr().out
    assert "2 of 3 checks failed" in text and "a rank was lost" in text and "NVIDIA/Megatron-LM#673" in text
    assert main(["doctor", "--zoo", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [case["passed"] for case in answer["cases"]] == [True, False, False] and not answer["good"]
    assert answer["cases"][1]["error"] == "inf" and answer["cases"][0]["link"].endswith("/issues/673")


@pytest.mark.whole
def test_the_command_runs_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--zoo", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cases"]) == len(KNOWN_ERRORS)

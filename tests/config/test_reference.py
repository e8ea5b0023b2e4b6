"""The page of the configuration is the one that its dataclasses give."""

from pathlib import Path

from longspan.config.defaults import _DEMO
from longspan.config.file import config_keys
from longspan.config.keys import section_keys
from longspan.config.plan_section import EvalConfig
from longspan.config.reference import OFTEN, reference_page
from longspan.config.sections import SourceConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_made_from_the_sections() -> None:
    command = "python -m longspan.config.reference docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == reference_page(), f"run: {command}"


def test_every_key_has_a_row_with_its_default_and_its_text() -> None:
    rows = [line for line in reference_page().splitlines() if line.startswith("| `")]
    rest = [key.partition(".")[2] for key in config_keys() if key not in OFTEN]
    rest += [key.name for kind in (SourceConfig, EvalConfig) for key in section_keys(kind)]
    assert [row.split("`")[1] for row in rows] == [*OFTEN, *rest]
    (rate,) = (row for row in rows if "`min_lr_ratio`" in row)
    assert rate.split(" | ")[1:3] == ["a number, at least 0, at most 1", "`0.1`"]


def test_the_page_begins_with_the_keys_that_most_runs_set() -> None:
    assert len(OFTEN) == 12 and set(OFTEN) <= set(config_keys())
    often, rarely = reference_page().split("## Rarely")
    assert all(f"`{key}`" in often for key in OFTEN) and "`model.preset`" not in often
    assert "### [model]" in rarely and "### [[eval]]" in rarely


def test_a_default_that_depends_on_other_keys_is_in_its_text() -> None:
    sections, _ = reference_page().split("### [[eval]]")
    depends = {row.split("`")[1].rpartition(".")[2] for row in sections.splitlines() if "| *see text* |" in row}
    by_slots = {"context_parallel_size", "max_tokens_per_slot", "eval_context_parallel_size"}
    evaluation = {"eval_hierarchical_context_parallel_sizes"}
    assert depends == {key.partition(".")[2] for key in _DEMO} - {"preset"} | {"path", "train"} | by_slots | evaluation

"""Recipes: each is answered by `longspan train FILE --dry-run`, and what is written next to them is what it answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.plans import recipes

from longspan.config.file import load_config

NAMES = sorted(path.stem for path in recipes.FOLDER.glob("*.toml"))
WRITTEN = recipes.read_rows(recipes.PAGE.read_text(encoding="utf-8"))
PLACES = [(gpu, count) for gpu, _ in recipes.GPUS for count in recipes.COUNTS]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Configurations of the families, tokenizers and chats."""
    with recipes.made_folder() as folder:
        yield folder


def test_recipes_say_what_their_names_say() -> None:
    assert WRITTEN.keys() == set(NAMES) and len(NAMES) == 20
    for name in NAMES:
        config, (family, kind, size) = load_config(recipes.FOLDER / f"{name}.toml"), name.rsplit("-", 2)
        assert bool(config.lora.rank) == (kind == "lora") and config.run.dir == f"runs/{name}"
        assert config.data.max_document_tokens == recipes.MADE[size][1]
        assert config.model.path in [*recipes.FAMILIES, "Qwen3-8B"]
        assert family in ("gemma-3-12b", "gpt-oss-20b", "llama-3.1-8b", "qwen3-8b", "qwen3-vl-8b")
    for name, row in WRITTEN.items():
        cells = row.split("|")[2:-1]
        assert len(cells) == len(PLACES) and any("GiB" in cell for cell in cells), name


@pytest.mark.parametrize(("name", "gpu", "count"), [("gpt-oss-20b-lora-32k", "h100", 4)])
def test_an_answer_is_that_of_a_dry_run(name: str, gpu: str, count: int, folder: Path) -> None:
    cell = recipes.cell(recipes.answer_of(name, folder, gpu, count))
    assert cell == WRITTEN[name].split("|")[2 + PLACES.index((gpu, count))].strip()


@pytest.mark.whole  # make recipes-check compares them too
@pytest.mark.parametrize("name", WRITTEN)
def test_all_answers_are_those_of_a_dry_run(name: str, folder: Path) -> None:
    assert recipes.row_of(name, folder) == WRITTEN[name]

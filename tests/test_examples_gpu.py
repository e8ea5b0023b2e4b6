"""The configurations in examples/ fit the numbers of ranks that their commands start. Nothing is trained here."""

import re
import shlex
from pathlib import Path

import pytest

from longspan.cli.flags import parse_train
from longspan.train.plans import PlanChoice
from longspan.train.run.config_check import check_config

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples").rglob("*.toml"))


def commands(path: Path) -> list[tuple[int, list[str]]]:
    """The ranks and the words after `longspan train` of every such command in the comment that begins a file."""
    found = []
    for line in re.findall(r"^#   (.*longspan train .*)$", path.read_text(), flags=re.MULTILINE):
        words = shlex.split(line)
        flag = "--world" if "--world" in words else "--nproc-per-node"
        found.append((int(words[words.index(flag) + 1]), words[words.index("train") + 1 :]))
    return found


CASES = [pytest.param(ranks, words, id=f"{path.stem}-{ranks}") for path in FILES for ranks, words in commands(path)]


@pytest.mark.parametrize(("ranks", "words"), CASES)
def test_a_configuration_fits_the_ranks_of_its_command(
    ranks: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    _, config = parse_train(words)
    home = check_config(config, ranks)
    choice = PlanChoice.training(config)
    longest = config.data.max_document_tokens
    choice.check(longest, home, f"a document of {longest} tokens")
    PlanChoice.evaluation(config).check(longest, home, f"a document of {longest} tokens")
    assert longest <= config.train.tokens_per_step


def test_every_configuration_states_its_command() -> None:
    assert all(commands(path) for path in FILES) and len(FILES) >= 8
    eight = [path for path in FILES if any(ranks == 8 for ranks, _ in commands(path))]
    assert len(eight) >= 3

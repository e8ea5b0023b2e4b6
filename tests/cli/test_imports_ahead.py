"""Which commands begin the imports of ranks before their own, and what those of a launcher are."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from longspan.cli import main as command
from longspan.errors import ConfigError
from longspan.launch import fork_server


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What happens, in order: the server begins and ends, and the verb is imported."""
    noted = list[object]()

    @contextmanager
    def note_server(environment: Mapping[str, str]) -> Iterator[None]:
        noted.append(dict(environment))
        try:
            yield
        finally:
            noted.append("end")

    def note_verb(name: str) -> None:
        noted.append(name)
        raise ConfigError("a flag that is refused")

    for name in ("RANK", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fork_server, "imports_for_ranks", note_server)
    monkeypatch.setattr(command, "import_module", note_verb)
    return noted


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_the_server_begins_before_the_verb_and_ends_after_its_error(
    verb: str, events: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["longspan", "--debug", verb, "run.toml"])
    assert command.main() == 2
    assert events == [{"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, f"longspan.cli.{verb}", "end"]
    events.clear()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert command.main() == 2
    assert events[0] == {}, "what the user has set stands"


@pytest.mark.parametrize(
    ("words", "torchrun"),
    [
        (["plan", "run.toml"], False),
        (["train", "--help"], False),
        (["train", "run.toml", "--dry-run"], False),
        (["train", "run.toml", "--dry_run"], False),
        (["eval", "-h"], False),
        (["train", "run.toml"], True),
    ],
)
def test_commands_without_ranks_of_their_own_begin_no_server(
    words: list[str], torchrun: bool, events: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torchrun:
        monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["longspan", *words])
    assert command.main() == 2
    assert events == [f"longspan.cli.{words[0]}"]


def test_a_caller_of_main_begins_no_server(events: list[object]) -> None:
    assert command.main(["train", "run.toml"]) == 2
    assert events == ["longspan.cli.train"]


def test_a_launcher_imports_neither_torch_nor_what_ranks_alone_need() -> None:
    """Its imports run beside those of the ranks, and print the first line."""
    heavy = {"torch", "transformers", "triton", "scipy", "sklearn", "torchvision", "pandas", "matplotlib", "datasets"}
    script = f"import longspan.cli.train, longspan.cli.eval, sys; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []

"""`longspan bench`: its list, where other benches went, its processes, and a record that is continued."""

from pathlib import Path

import pytest
from bench.begun import open_record

from longspan.bench.benches import BENCHES, SCRIPTS, BenchFlags, write_record
from longspan.cli.main import main
from longspan.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert main(["bench", *words]) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in BENCHES) and list(BENCHES) == ["calibrate", "step"]
    assert main(["bench", "stp"]) == 2
    assert "longspan bench has no 'stp'; it has calibrate, step" in capsys.readouterr().err


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_bench_of_the_repository_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--world", "2"]) == 2
    assert f"bench {name} is a script of the repository: python {SCRIPTS[name]}" in capsys.readouterr().err
    assert (ROOT / SCRIPTS[name]).is_file()


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("gpus", "world", "variables", "expected"),
    [
        (0, 0, {}, (3, "gloo")),
        (4, 0, {}, (4, "nccl")),
        (4, 2, {}, (2, "nccl")),
        (4, 0, TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, (8, "nccl")),
    ],
)
def test_how_many_processes_and_what_they_talk_through(
    gpus: int, world: int, variables: dict[str, str], expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("longspan.cli.processes.usable_gpus", lambda: gpus)
    assert BenchFlags(world=world).processes(without_gpus=3) == expected
    if not variables:
        assert BenchFlags(world=world, device="cpu").processes(without_gpus=3) == (world or 3, "gloo")


def test_a_record_goes_on_with_figures_of_its_own_kind_alone(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    begun = open_record("some", out, "gloo", tmp_path, ranks=4)
    write_record(begun, out, "")
    assert open_record("some", out, "gloo", tmp_path, ranks=4) == begun
    with pytest.raises(ConfigError, match="figures of ranks 4, asked for 2: give another --out"):
        open_record("some", out, "gloo", tmp_path, ranks=2)

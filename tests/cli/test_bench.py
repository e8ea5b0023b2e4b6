"""`longspan bench`: its list, and the attention bench on two CPU processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.bench.attention.cases import Settings
from longspan.bench.attention.command import AttentionFlags, make_settings, record_markdown, record_text
from longspan.bench.attention.ranks import forward_flops
from longspan.bench.benches import BENCHES
from longspan.bench.record import open_record, write_record
from longspan.cli.main import main
from longspan.errors import ConfigError


def settings(**changes: Any) -> Settings:
    return make_settings(AttentionFlags(**changes), 2, "gloo", ["bench"])


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert main(["bench", *words]) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in BENCHES) and "attention" in BENCHES
    assert main(["bench", "atention"]) == 2
    assert "longspan bench has no 'atention'; it has attention" in capsys.readouterr().err


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
    assert AttentionFlags(world=world).processes(without_gpus=3) == expected
    if not variables:
        assert AttentionFlags(world=world, device="cpu").processes(without_gpus=3) == (world or 3, "gloo")


def test_flops_of_the_lower_half() -> None:
    """4 * S^2 * heads * head size / 2, for each document."""
    assert forward_flops(settings(heads=32, head_size=128), 16384) == 4 * 16384**2 * 32 * 128 / 2
    assert forward_flops(settings(heads=1, head_size=1, documents=3), 10) == 2 * (16 + 9 + 9)
    assert forward_flops(settings(heads=1, head_size=1, window=4), 10) == 4 * (10 * 4 - 8)
    assert forward_flops(settings(heads=1, head_size=1, window=400), 10) == 2 * 100


def test_attention_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records" / "a.json"
    words = ["--world", "2", "--lengths", "96,130", "--repeats", "2", "--warmup", "1", "--documents", "2"]
    assert main(["bench", "attention", *words, "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(out.read_text())
    of_longspan = [row for row in record["rows"] if row["name"].startswith("longspan")]
    assert [(row["name"], row["length"]) for row in of_longspan] == [
        (f"longspan {kind}", length) for kind in ("p2p", "all_gather", "a2a", "a2a+p2p") for length in (96, 130)
    ]
    assert all(row["seconds"] > row["forward_seconds"] > 0 and row["tflops_per_device"] > 0 for row in of_longspan)
    checks = {row["name"]: row for row in record["checks"]}
    assert checks["longspan p2p"]["good"] and checks["longspan p2p"]["errors"].keys() == {"output", "dq", "dk", "dv"}
    peers = [row for row in record["rows"] if "missing" in row]
    assert len(peers) == 4 and all(row["name"].startswith("torch context_parallel") for row in peers)
    assert {"machine", "versions", "command"} <= record.keys() and record["command"].startswith("longspan bench")
    table = out.with_suffix(".md").read_text()
    assert table == record_markdown(record) and "| longspan p2p | 96 |" in table and "2 packed documents" in table
    assert "not available: ValueError: its attention kernels run on CUDA only" in record_text(record)


def test_contiguous_rows_are_in_the_record_and_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world", "2", "--lengths", "41", "--repeats", "1", "--warmup", "0", "--no-peers", "--types", "a2a,p2p"]
    assert main(["bench", "attention", *words, "--partition", "contiguous", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["partition"] == "contiguous" and all(row["good"] for row in record["checks"])
    assert "float32, longspan's rows contiguous, kernel" in record_text(record)
    assert "contiguous" not in record_text(record | {"partition": "zigzag"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--types", "p2p,ring"], "--types 'p2p,ring': this release has p2p and all_gather and a2a and a2a+p2p"),
        (["--types", ""], "this release has p2p and all_gather"),
        (
            ["--world", "2", "--hierarchical", "2,2"],
            "--hierarchical '2,2': give two sizes whose product is the 2 ranks",
        ),
        (["--window", "-1"], "--window -1: at least 1"),
        (["--lengths", "16K"], "--lengths '16K' is not a list of integers"),
        (["--world", "2", "--cuda-graph"], "--cuda-graph needs a GPU for each rank; these 2 talk through gloo"),
        (["--lengths", "0"], "1 documents do not share 0 rows"),
        (["--repeats", "0"], "--repeats 0"),
        (["--world", "-2"], "--world is -2"),
        (["--dtyp", "x"], "longspan bench attention has no flag --dtyp: did you mean '--dtype'?"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_record_goes_on_with_figures_of_its_own_kind_alone(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    begun = open_record("some", out, "gloo", tmp_path, ranks=4)
    write_record(begun, out, "")
    assert open_record("some", out, "gloo", tmp_path, ranks=4) == begun
    with pytest.raises(ConfigError, match="figures of ranks 4, asked for 2: give another --out"):
        open_record("some", out, "gloo", tmp_path, ranks=2)

"""`longspan plan --compare`: planners next to each other, and degrees of an evaluation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longspan.cli.main import main
from longspan.layout import Layout
from longspan.plan import Cost, CostSettings, Machine, plan_fixed
from longspan.plan.distributions import sample_lengths

COMPARE = ("plan", "--compare")
Rows = dict[str, dict[str, Any]]


@pytest.fixture
def compared(capsys: pytest.CaptureFixture[str]) -> Callable[..., Rows]:
    """The rows of a comparison by name."""

    def compare(words: str, *more: str) -> Rows:
        assert main([*COMPARE, *words.split(), *more, "--json"]) == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)["plans"]}

    return compare


@pytest.mark.whole
def test_the_case_of_8192_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--world 8192 --tp 2 --pp 4 --same 1024x8192 --which-eval-degree --cp-comm-type p2p"
    assert main([*COMPARE, *words.split()]) == 0
    out = capsys.readouterr().out
    assert "8,192 ranks = 1,024 slots x tp 2 x pp 4" in out
    assert "fills up each pass to 4 micro-batches at cp 1: 4,096 documents in place of 1,024, " in out
    assert "evaluation at cp 4, p2p: 1,024 documents in " in out


def test_degrees_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--slots", "8", "--pp", "2", "--same", "8x64", "--which-eval-degree", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    *degrees, dynamic = answer["plans"]
    assert [row["name"] for row in degrees] == [f"fixed, cp {cp}" for cp in (1, 2, 4, 8)]
    assert "16 documents in place of 8" in answer["filled"]
    best = min(degrees, key=lambda row: row["seconds"])
    assert best["name"].endswith(f"cp {answer['best_cp']}")
    assert f"evaluation at cp {answer['best_cp']}" in answer["reason"]
    assert all(row["lower_bound_seconds"] <= row["seconds"] for row in (*degrees, dynamic))


@pytest.mark.parametrize("words", ["", "--pp 2 --vpp 2", "--tp 2 --evaluation", "--mode free"])
def test_planners_beside_each_other(
    words: str, compared: Callable[..., Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"--slots 8 --distribution expo --longest-document 30000 {words}"
    rows = compared(base)
    assert rows.keys() == {"padded, cp 4", "fixed, cp 4", "fixed, cp 8", "dynamic"}
    assert all(row["seconds"] >= row["lower_bound_seconds"] * 0.999999 for row in rows.values())
    assert rows["padded, cp 4"]["seconds"] > rows["fixed, cp 4"]["seconds"]
    if not words:
        assert main([*COMPARE, *base.split()]) == 0
        assert "fixed, cp 4" in capsys.readouterr().out


def test_fixed_plans_are_compared_under_their_fastest_type(capsys: pytest.CaptureFixture[str]) -> None:
    """As rings, fixed plans would seem to take half as long again as the dynamic one."""
    words = [*COMPARE, "--distribution", "lognorm", "--seed", "1", "--slots", "32", "--json"]
    assert main(words) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["plans"]}
    lengths = sample_lengths("lognorm", 32 * 32768, seed=1, longest=131072).tolist()
    for cp in (16, 32):
        seconds = {}
        for kind, inner in (("p2p", 1), ("all_gather", 1), ("a2a", 1), *(("a2a+p2p", inner) for inner in (2, 4, 8))):
            cost, sizes = Cost().under(kind, inner), (inner, cp // inner) if inner > 1 else None
            options: Any = {"cp_comm_type": kind, "hierarchical_context_parallel_sizes": sizes, "cost": cost}
            plan = plan_fixed(lengths, Layout(32), cp, max_tokens_per_slot=8192, **options)
            seconds[f"{kind} {sizes}" if sizes else kind] = plan.predicted_seconds
        row = rows[f"fixed, cp {cp}"]
        assert row["seconds"] <= min(seconds.values()) and row["seconds"] < 0.8 * seconds["p2p"]
        assert min(seconds, key=lambda name: seconds[name]).split()[0] in row["cp_comm_type"]
    assert rows["dynamic"]["seconds"] < rows["fixed, cp 32"]["seconds"] < 1.01 * rows["dynamic"]["seconds"]
    assert main(words[:-1]) == 0
    out = capsys.readouterr().out
    assert "less time than the fastest plan of one degree (fixed, cp 32 under " in out


def test_the_closing_of_free_mode_has_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--slots 8 --tp 2 --distribution expo --longest-document 30000 --mode free"
    assert main([*COMPARE, *words.split()]) == 0
    out = capsys.readouterr().out
    assert "not priced" in out and "--gpu NAME --gpus N --model FOLDER prices it" in out


def test_a_planner_that_cannot_is_named_and_nothing_possible_is_an_error(
    compared: Callable[..., Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "fixed, cp 6" in compared("--slots 6 --same 3x40000 --max-tokens-per-slot 9000")
    refused = compared("--slots 6 --same 3x20000 --max-tokens-per-slot 9000 --cp 4")["fixed, cp 4"]
    assert "cp 4 does not divide 6 slots" in refused["error"]
    words = "--slots 4 --same 1x262144"  # whose rows are what the longest document needs
    assert {row["rows"] for row in compared(words).values()} == {65536}
    assert main(["plan", *words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_tokens_per_slot"] == 65536
    assert main([*COMPARE, *words.split(), "--max-tokens-per-slot", "9000"]) == 2
    out = capsys.readouterr().out
    assert "fixed, cp 4: not possible: document 0 has 262144 rows" in out and "x bound" not in out


OF_SLOTS = "--slots 4 --same 2x5"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--same 2x5", "longspan plan needs slots"),
        ("--same 2x5 --world 8 --slots 8", "give --world or --slots, one of them"),
        ("--same 2x5 --world 9 --tp 2", "9 ranks are not divisible by tp 2 x pp 1"),
        ("--slots 4", "give one of --lengths"),
        (f"{OF_SLOTS} --mtp-depths 1", "--mtp-depths 1 with no --model; give --model FOLDER"),
        (f"{OF_SLOTS} --cp 2 --which-eval-degree", "--cp 2 is one row, and --which-"),
        (f"{OF_SLOTS} --min-cp 4 --max-cp 2", "--min-cp is 4 and --max-cp 2; give"),
        (f"{OF_SLOTS} --planner my.planner --which-eval-degree", "--planner my.planner is one row"),
        (f"{OF_SLOTS} --plot a.svg", "--plot is of one plan"),
        ("--slots 4 --same 1x90 --which-eval-degree --max-tokens-per-slot 9", "to 23 or more"),
    ],
)
def test_bad_input(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_degrees_that_the_query_heads_do_not_allow_are_not_compared(compared: Callable[..., Rows]) -> None:
    words = "--slots 16 --tp 2 --same 8x64 --heads 8 --cp-comm-type"
    assert [*compared(words, "a2a")] == ["padded, cp 1", "fixed, cp 1", "fixed, cp 2", "fixed, cp 4", "dynamic"]
    degrees = compared(words, "a2a", "--which-eval-degree")
    assert [*degrees] == ["fixed, cp 1", "fixed, cp 2", "fixed, cp 4", "dynamic"]
    chosen = compared(words, "auto", "--which-eval-degree")
    assert [*chosen] == [*(f"fixed, cp {cp}" for cp in (1, 2, 4, 8, 16)), "dynamic"]
    assert "a2a" not in {chosen[f"fixed, cp {cp}"]["cp_comm_type"] for cp in (8, 16)}


def test_a_comparison_at_given_degrees(tmp_path: Path, compared: Callable[..., Rows]) -> None:
    (lengths := tmp_path / "lengths.json").write_text("[9000, 9000, 400, 300, 20]")
    words = f"--slots 8 --lengths {lengths} --max-tokens-per-slot 4096 "
    free = compared(words)
    assert [*free] == ["padded, cp 4", "fixed, cp 4", "fixed, cp 8", "dynamic"]
    assert [*compared(words + "--cp 8")] == ["padded, cp 8", "fixed, cp 8", "dynamic"]
    assert "does not divide 8 slots" in compared(words + "--cp 3")["fixed, cp 3"]["error"]
    assert compared(words + "--min-cp 8")["dynamic"]["seconds"] > free["dynamic"]["seconds"]
    assert "more than the 8192 that cp 2" in compared(words + "--max-cp 2")["dynamic"]["error"]
    words += "--micro-batch-multiple 3"
    assert {row["micro_batches"] % 3 for row in compared(words).values()} == {0}
    assert {row["micro_batches"] % 6 for row in compared(words, "--pp", "2", "--vpp", "2").values()} == {0}
    words = "--slots 8 --same 3x9000 --which-eval-degree --max-tokens-per-slot 9000"
    one = compared(words, "--max-cp", "1")["dynamic"]["seconds"]
    assert one > 1.5 * compared(words)["dynamic"]["seconds"]


def test_depths_of_multi_token_prediction_are_counted(tmp_path: Path, compared: Callable[..., Rows]) -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"vocab_size": 1000}))
    words = f"--slots 2 --same 4x4096 --model {tmp_path}"
    bare, one = (compared(words, *more)["fixed, cp 1"] for more in ([], ["--mtp-depths", "1"]))
    assert one["seconds"] > bare["seconds"]
    for depths, found in enumerate((bare, one)):
        cost = Machine().cost(tmp_path, CostSettings(depths=depths, shards=2))
        plan = plan_fixed((4096,) * 4, Layout(2), 1, max_tokens_per_slot=8192, cost=cost)
        assert found["seconds"] == plan.predicted_seconds
    evaluation = compared(words, "--evaluation", "--mtp-depths", "1")  # which runs without them
    assert evaluation == compared(words, "--evaluation")

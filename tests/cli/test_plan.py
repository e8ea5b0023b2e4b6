"""`longspan plan`: what goes in and comes out; with --compare, planners and degrees next to each other."""

import io
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from longspan.cli.main import main
from longspan.config.file import load_config
from longspan.layout import Layout
from longspan.plan import Cost, CostSettings, Machine, Plan, plan_fixed
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.train.plans import find_run_cost
from tests.plan.items.test_encoder_shape import QWEN3_VL_8B


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.json"
    path.write_text("[300, 20, 40, 900]")
    return str(path)


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Plan, dict[str, Any]]:
    assert main(["plan", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "planned in" in err
    return Plan.from_json(out), json.loads(out)


FLAGS: dict[str, dict[str, Any]] = {
    "": {"planner": "dynamic"},
    "--cp 2": {"planner": "fixed"},
    "--planner fixed": {"planner": "fixed"},
    "--planner padded": {"planner": "padded"},
    "--mode free --cp 2": {"mode": "free"},
    "--node-size 2": {"node_size": 2},
    "--row-multiple 4 --cp 2": {"row_multiple": 4},
    "--row_multiple=4 --cp=2": {"row_multiple": 4},
}


def test_flags_reach_the_plan(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--lengths", lengths, "--slots", "4", "--max-tokens-per-slot", "512"]
    for words, expected in FLAGS.items():
        plan, answer = planned([*base, *words.split()], capsys)
        assert expected.items() <= answer.items() and plan.max_tokens_per_slot == 512, words
        assert answer["slots"] == 4 and answer["tokens"] == 1260
        assert {"lengths", "micro_batches", "targets", "predicted_seconds", "lower_bound_seconds"} <= answer.keys()


def test_a_plan_without_a_degree_takes_the_smallest_that_fits(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--lengths", lengths, "--slots", "6", "--planner", "fixed"]
    for cap, degree in ((900, 1), (450, 2), (449, 3), (299, 6), (0, 1)):
        plan, _ = planned([*base, "--max-tokens-per-slot", str(cap)], capsys)
        assert {g.degree for m in plan.micro_batches for g in m.groups} == {degree}
    plan, _ = planned([*base, "--cp", "2", "--micro-batch-multiple", "4", "--max-tokens-per-slot", "500"], capsys)
    assert len(plan.micro_batches) == 4
    words = ["--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "3", "--cp", "6"]
    plan, _ = planned([*base, *words, "--partition", "contiguous"], capsys)
    (group,) = plan.micro_batches[0].groups
    assert (group.hierarchical_context_parallel_sizes, group.partition) == ((2, 3), "contiguous")


def test_lengths_from_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("x" * 400)
    (tmp_path / "text" / "b.jsonl").write_text('{"text": "yyyyyyyy"}\n{"text": "zzzz"}\n')
    (tmp_path / "text" / "binary.txt").write_bytes(b"\xff\xfe\xff")
    base = ["--slots", "2", "--planner", "fixed"]
    assert planned([*base, "--data", str(tmp_path / "text")], capsys)[0].lengths == (100, 2, 1)
    cut = [*base, "--data", str(tmp_path / "text"), "--max-document-tokens", "40"]
    assert planned(cut, capsys)[0].lengths == (40, 40, 20, 2, 1)
    assert planned([*base, "--same", "3x50"], capsys)[0].lengths == (50, 50, 50)
    drawn = planned([*base, "--distribution", "uniform", "--tokens", "9000", "--longest-document", "4000"], capsys)[0]
    assert drawn.tokens >= 9000 and max(drawn.lengths) <= 4000
    plan = tmp_path / "plan.json"
    plan.write_text(drawn.to_json())
    assert planned([*base, "--lengths", str(plan)], capsys)[0].lengths == drawn.lengths
    monkeypatch.setattr(sys, "stdin", io.StringIO("[5, 6]"))
    assert planned([*base, "--lengths", "-"], capsys)[0].lengths == (5, 6)


def test_a_tokenizer_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.md").write_text("a b c a")
    words = ["--slots", "1", "--data", str(tmp_path / "a.md"), "--tokenizer", str(tmp_path)]
    assert planned(words, capsys)[0].lengths == (4,)
    assert main(["plan", *words]) == 0
    assert f"tokens counted with {tmp_path}" in capsys.readouterr().out


def test_table_and_files(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("html", "svg", "png") if find_spec("matplotlib") else ("html", "svg")
    files = {kind: tmp_path / f"plan.{kind}" for kind in kinds}
    words = ["--plot", *map(str, files.values())]
    assert main(["plan", "--lengths", lengths, "--slots", "4", "--cp", "2", *words]) == 0
    out = capsys.readouterr().out
    assert "--gpu" not in out and "fixed plan, lockstep: 4 slots" in out
    assert "x the lower bound" in out and "planned in" in out
    assert all(f"wrote {path}" in out for path in files.values())
    assert files["html"].read_text().startswith("<!doctype html>")
    assert main(["plan", "--lengths", lengths, "--slots", "4", "--mode", "free"]) == 0
    out = capsys.readouterr().out
    assert "closing  " not in out and "is not in these seconds;\n--gpu NAME --gpus N --model FOLDER prices it" in out
    assert "png" not in files or files["png"].stat().st_size > 1000
    drawn = "".join(ElementTree.fromstring(files["svg"].read_text()).itertext())
    assert "plan of 4 documents" in drawn and "nothing to do" in drawn and "predicted seconds" in drawn


OF_SLOTS = "--slots 4 --same 2x5"
BAD = [
    ("--slots 4", "give one of --lengths FILE.json, --data PATH, "),
    (f"{OF_SLOTS} --data x", "got --data and --same"),
    ("--slots 4 --same 5", "--same '5' is not COUNTxLENGTH"),
    ("--slots 4 --same 2x0", "0"),
    ("--slots 4 --distribution normal", "--distribution 'normal' is unknown; use one of lognorm"),
    ("--slots 4 --lengths nowhere.json", "cannot read lengths from nowhere.json: No such file"),
    ("--slots 4 --data nowhere", "'nowhere' does not exist"),
    (f"{OF_SLOTS} --cp 3", "cp 3 does not divide 4 slots"),
    (f"{OF_SLOTS} --cp 2 --planner dynamic", "use --min-cp and --max-cp"),
    (f"{OF_SLOTS} --plot /nowhere/x.html", "cannot write /nowhere/x.html: there is no folder"),
    (f"{OF_SLOTS} --plot x.jpg", "--plot x.jpg: a plan is drawn as .html, .svg or .png"),
    ("--slots 4 --same 4x262144 --max-tokens-per-slot 8192", "that cp 4 x --max-tokens-per-slot 8192"),
    (f"{OF_SLOTS} --tflops -1", "--tflops -1: a speed is above 0"),
    (f"{OF_SLOTS} --tflops 400 --machine x", "x, which has its own speed; give --tflops"),
    (f"{OF_SLOTS} --min-cp 5", "error: --min-cp 5 is above the 4 slots; use at most 4"),
    (f"{OF_SLOTS} --tp 2", "--tp is of comparisons; add --compare, or leave it out"),
    (f"{OF_SLOTS} --evaluation", "--evaluation is of comparisons; add --compare"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err and len(err.splitlines()) == 1


def test_bad_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"[1, 2.5]": "2.5", "[1, true]": "True", "[1, 0]": "0", "[]": "no documents", "[1": "it is not JSON"}
    for text, message in (texts | {'{"documents": []}': "holds no lengths"}).items():
        (tmp_path / "l.json").write_text(text)
        assert main(["plan", "--slots", "2", "--lengths", str(tmp_path / "l.json")]) == 2
        assert message in capsys.readouterr().err


def model_folder(tmp_path: Path, **values: int) -> str:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"vocab_size": 1000} | values))
    return str(tmp_path)


def test_degrees_of_a2a_divide_the_query_heads_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = "--distribution lognorm --slots 24 --max-tokens-per-slot 8192 --longest-document 60000 --cp-comm-type a2a"
    words = base.split()
    model = model_folder(tmp_path)
    for more, heads in (([], 32), (["--heads", "12"], 12), (["--model", model, "--max-tokens-per-slot", "12000"], 6)):
        plan, _ = planned([*words, *more], capsys)
        degrees = {group.degree for batch in plan.micro_batches for group in batch.groups}
        assert degrees != {1} and all(heads % degree == 0 for degree in degrees)
    fixed = ["--same", "4x9000", "--slots", "6", "--planner", "fixed", "--cp-comm-type", "a2a", "--max-tokens-per-slot"]
    plan, _ = planned([*fixed, "3000", "--heads", "10", "--slots", "20"], capsys)
    assert {group.degree for batch in plan.micro_batches for group in batch.groups} == {5}  # 4 would hold them, too


def test_a_model_without_attention_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 48, "vocab_size": 256}
    sizes |= {"num_heads": 6, "head_dim": 16, "state_size": 16, "n_groups": 2}
    words = ["plan", "--same", "1x900", "--slots", "6", "--planner", "fixed", "--cp", "3", "--model", str(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert main(words) == 2 and "has no mamba_d_conv or conv_kernel" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"conv_kernel": 4}))
    for kind in ("a2a", "p2p"):
        assert main([*words, "--cp-comm-type", kind]) == 0


def test_devices_of_another_speed_price_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--same", "4x900", "--slots", "2", "--cp", "1"]
    plan, _ = planned([*words, "--tflops", "400"], capsys)
    usual, _ = planned(words, capsys)
    assert plan.predicted_seconds == pytest.approx(usual.predicted_seconds, rel=0.01)
    fast, _ = planned([*words, "--tflops", "800"], capsys)
    launch = usual.cost.micro_batch_seconds
    assert (plan.predicted_seconds - launch) / (fast.predicted_seconds - launch) == pytest.approx(2)
    assert fast.cost.source == "Qwen3-8B on GPUs of 800 TFLOP/s"


def test_a_model_prices_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path)
    plan, _ = planned(["--same", "4x900", "--slots", "2", "--model", model], capsys)
    config = load_config(None, {"model.path": model})
    expected = find_run_cost(config, model, print, gpu=True, slots=2)  # as training prices it, FSDP2 included
    assert plan.cost == expected.under("auto", heads=6)
    free, _ = planned(["--same", "4x900", "--slots", "2", "--model", model, "--mode", "free"], capsys)
    assert free.cost == Machine.known("H200").cost(model, CostSettings(shards=2, free=True)).under("auto", heads=6)
    assert main(["plan", "--same", "4x900", "--slots", "2", "--heads", "8", "--model", model]) == 2
    assert "--heads 8 and --model" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["p2p", "a2a+p2p"])
def test_a_planner_of_ones_own(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = "tests.train.plans.own_things."
    words = ["--slots", "4", "--same", "6x900", "--max-tokens-per-slot", "1024", "--cp-comm-type", kind]
    words += ["--planner", f"{own}one_by_one"]
    plan, _ = planned(words, capsys)
    assert plan.planner == f"{own}one_by_one"
    groups = [group for batch in plan.micro_batches for group in batch.groups]
    assert [group.slots for group in groups] == [(0, 1, 2, 3)] * 6
    assert all((group.hierarchical_context_parallel_sizes is None) == (kind == "p2p") for group in groups)
    assert main(["plan", "--compare", *words, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["plans"]}
    assert {f"{own}one_by_one", "dynamic", "fixed, cp 1"} < rows.keys()
    assert rows[f"{own}one_by_one"]["seconds"] == plan.predicted_seconds > rows["dynamic"]["seconds"]


def test_a_tower_that_is_not_priced_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_8B | {"text_config": QWEN3_8B}))
    assert main(["plan", "--same", "8x32768", "--slots", "8", "--cp", "4", "--model", str(tmp_path)]) == 0
    assert "the model has a tower for images, which is not in these seconds" in capsys.readouterr().out


# ---- --compare


COMPARE = ("plan", "--compare")
Rows = dict[str, dict[str, Any]]


@pytest.fixture
def compared(capsys: pytest.CaptureFixture[str]) -> Callable[..., Rows]:
    """The rows of a comparison by name."""

    def compare(words: str, *more: str) -> Rows:
        assert main([*COMPARE, *words.split(), *more, "--json"]) == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)["plans"]}

    return compare


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
def test_planners_side_by_side(words: str, compared: Callable[..., Rows], capsys: pytest.CaptureFixture[str]) -> None:
    base = f"--slots 8 --distribution expo --longest-document 30000 {words}"
    rows = compared(base)
    assert rows.keys() == {"padded, cp 4", "fixed, cp 4", "fixed, cp 8", "dynamic"}
    assert all(row["seconds"] >= row["lower_bound_seconds"] * 0.999999 for row in rows.values())
    assert rows["padded, cp 4"]["seconds"] > rows["fixed, cp 4"]["seconds"]
    if not words:
        assert main([*COMPARE, *base.split()]) == 0
        assert "fixed, cp 4" in capsys.readouterr().out


def test_fixed_plans_are_compared_under_their_fastest_type(capsys: pytest.CaptureFixture[str]) -> None:
    words, seconds = [*COMPARE, "--same", "2x60000", "--slots", "16", "--cp", "16"], dict[str, float]()
    assert main([*words, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["plans"]}
    for kind, inner in (("p2p", 1), ("all_gather", 1), ("a2a", 1), ("a2a+p2p", 2), ("a2a+p2p", 4)):
        options: Any = {"cp_comm_type": kind, "hierarchical_context_parallel_sizes": (inner, 16 // inner)}
        plan = plan_fixed([60000] * 2, Layout(16), 16, cost=Cost().under(kind, inner), **options)
        seconds[f"{kind} ({inner}, {16 // inner})"] = plan.predicted_seconds
    row = rows["fixed, cp 16"]
    assert row["cp_comm_type"] == min(seconds, key=lambda name: seconds[name]) == "a2a+p2p (2, 8)"
    assert row["seconds"] == min(seconds.values())
    assert main(words) == 0
    assert "the fastest plan of one degree (fixed, cp 16 under a2a+p2p" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--same 2x5 --world 8 --slots 8", "give --world or --slots, one of them"),
        ("--same 2x5 --world 9 --tp 2", "9 ranks are not divisible by tp 2 x pp 1"),
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

"""`longspan bench step` on two CPU processes, what it refuses; scripts of bench/ on a few processes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench.attention import attention_types
from bench.attention.attention_types import AttentionFlags, AttentionSettings, forward_flops
from bench.bridge import bridge_time
from bench.evaluation import evaluation_degrees
from bench.evaluation.evaluation_degrees import EvalBenchFlags
from bench.training.step_peers import peer_cases

from longspan.bench.step import StepSettings, main as bench_step, make_settings, parse_step_flags, record_text
from longspan.cli.main import main
from longspan.config.file import to_toml
from longspan.errors import ConfigError
from tests.train.small import small_config

THINGS = "tests.resolve.own_things."
OWN = f"{THINGS}one_by_one"


def settings(*words: str, ranks: int = 2, backend: str = "gloo") -> StepSettings:
    return make_settings(*parse_step_flags(words), ranks, backend, ["bench"])


def test_steps_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records" / "s.json"
    words = ["--world", "2", "--lengths", "40,24,9,7", "--repeats", "1", "--warmup", "0", "--out", str(out)]
    words += ["--context.max_tokens_per_slot", "40", "--run.machine", "h200"]
    words += ["--planners", OWN, "--layers", "1"]
    words += ["--train.activation_checkpointing", "full"]
    assert bench_step([*words, "--json"], peer_cases) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(out.read_text())
    *planned, peer = record["rows"]
    assert [row["name"] for row in planned] == [f"longspan {OWN}"]
    for row in planned:
        assert row["seconds"] > 0 and row["prediction_ratio"] == row["predicted_seconds"] / row["seconds"]
        assert row["tokens_per_second_per_device"] == pytest.approx(80 / row["seconds"] / 2)
    assert peer["name"].endswith("whole packed documents, SDPA, 0 of 1 layers recomputed")
    assert peer["micro_batches"] == 1
    assert peer["loss"] == pytest.approx(planned[0]["loss"], rel=1e-6)
    assert {"machine", "versions", "command", "cost", "configuration"} <= record.keys()
    assert record["lengths"] == [40, 24, 9, 7] and record["shape"]["layers"] == 1
    table = out.with_suffix(".md").read_text()
    assert table == record_text(record) and f"| longspan {OWN} |" in table
    assert "recomputation full, float32" in table
    assert "allocator" not in table and planned[0]["allocator_retries"] == 0
    planned[0] |= {"allocator_retries": 2.0, "peak_bytes": 125 << 30, "reserved_bytes": 137 << 30}
    assert f"longspan {OWN}: the GPU's allocator ran out of memory 2 times a step" in record_text(record)


def test_a_planner_of_ones_own() -> None:
    words = ["--lengths", "40,24,9,7", "--context.max_tokens_per_slot", "40", "--planners"]
    assert len(settings(*words, f"fixed,{OWN}").plan(OWN).micro_batches) == 4
    for name, message in (("fails", "KeyError"), ("nowhere", "is no function"), ("nothing", "returned NoneType")):
        with pytest.raises(ConfigError, match=f"{THINGS}{name}.*{message}"):  # before a process starts
            settings(*words, THINGS + name)
    with pytest.raises(ConfigError, match="this release has padded, fixed, dynamic, or none; one of your own has its"):
        settings(*words, "mine")


def test_the_steps_of_a_run_by_its_plan_of_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    free = {"context__planner": "dynamic", "context__mode": "free", "train__steps": 1, "evaluation__documents": 0}
    config = small_config(tmp_path, **free, optimizer__class="sgd", train__seed=3)
    (tmp_path / "run.toml").write_text(to_toml(config))
    bench = ["bench", "step", str(tmp_path / "run.toml"), "--world", "2", "--repeats", "1", "--warmup", "0", "--json"]
    open_rows = ["--context.max_tokens_per_slot", "auto"]  # which memory decides, as in the run
    assert main([*bench, "--train.device_memory_limit", "100000000", "--same", "4x24", *open_rows]) == 0
    captured = capfd.readouterr()
    record = json.loads(captured.out)
    assert "model: qwen3-tiny, 2 layers\nlongspan dynamic: 2 steps\n" in captured.err
    (row,) = record["rows"]
    assert row["name"] == "longspan dynamic" and record["cost"]["closing_seconds"] > 0  # of free mode
    assert record["tokens"] == 96 and record["configuration"]["optimizer"]["class"] == "sgd"
    assert (
        record["memory"]["checkpoint_policies"] == ["none", "none"] and 0 < record["memory"]["device"]["total"] < 10**8
    )
    assert "memory: 2 of 2 layers keep all" in record_text(record)
    assert "recomputation auto" in record_text(record) and "| planned |" in record_text(record)


def test_a_run_and_its_bench_have_the_same_configuration() -> None:
    words = "--lengths 40,24 --parallel.pp 2 --train.compile layers --model.preset qwen3-moe-tiny"
    bench = settings(*words.split(), "--context.mode", "lockstep", ranks=4)
    assert bench.home.pp == 2 and bench.config.train.compile and bench.config.optimizer.lr == 0
    assert bench.configuration.num_experts == bench.to_json()["shape"]["experts"] == 8
    assert len(bench.plan("fixed").micro_batches) % 2 == 0


def test_flags_of_the_model_change_what_they_name_and_nothing_else() -> None:
    whole = settings("--model.preset", "qwen3-moe-tiny").configuration.to_dict()
    short = settings("--model.preset", "qwen3-moe-tiny", "--layers", "1").configuration.to_dict()
    changed = {key for key in whole if whole[key] != short[key]}
    assert short["num_hidden_layers"] == 1 and changed <= {"num_hidden_layers", "layer_types"}


def test_sequences_are_timed_together_or_alone_each_over_all_slots() -> None:
    degree = ["--planners", "fixed", "--context.context_parallel_size", "4"]
    bench = settings("--lengths", "4096", *degree, ranks=4)
    (batch,) = bench.plan("fixed").micro_batches
    assert [group.degree for group in batch.groups] == [4] and bench.config.context.max_tokens_per_slot == 0
    bench = settings("--sequences", "4096,64", "--planners", "fixed", ranks=4)
    assert bench.config.context.context_parallel_size == 4
    assert [(batch.lengths, batch.sequences) for batch in bench.batches()] == [((4096,), ()), ((64,), ())]
    together = settings("--lengths", "4096,64", "--planners", "fixed", ranks=4)
    assert together.batches() == [together]


@pytest.mark.parametrize(("cap", "least"), [(1024, 4), (2048, 2), (4096, 1)])
def test_the_fixed_degree_is_the_fastest_that_holds_the_longest(cap: int, least: int) -> None:
    words = ["--lengths", "4096,10", "--planners", "fixed", "--context.max_tokens_per_slot", str(cap)]
    chosen = settings(*words, ranks=4)
    degrees = [cp for cp in (1, 2, 4) if cp >= least]
    others = [settings(*words, "--context.context_parallel_size", str(cp), ranks=4).plan("fixed") for cp in degrees]
    seconds = [plan.predicted_seconds for plan in others]
    assert chosen.plan("fixed").predicted_seconds == min(seconds)
    assert chosen.config.context.context_parallel_size == degrees[seconds.index(min(seconds))]


def test_gpus_compute_in_bfloat16_unless_told() -> None:
    words = ["--lengths", "40,24", "--peak_tflops", "1.0", "--planners", "fixed", "--model.preset", "qwen3-tiny"]
    kinds = [("gloo", []), ("nccl", []), ("nccl", ["--model.compute_dtype", "float32"])]
    assert [settings(*words, *more, backend=backend).compute for backend, more in kinds] == ["", "bfloat16", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--planners fixed,static", "--planners 'fixed,static': this release has padded, fixed, dynamic"),
        ("--planners none", "--planners is none: nothing to time; name some of padded"),
        ("--model.preset qwen4", "unknown model preset 'qwen4'"),
        ("--layers -2", "--layers is -2; it must be at least 0"),
        ("--repeats 0", "--repeats 0"),
        ("--out steps.md", "--out steps.md: the record is JSON, its table goes beside it; give steps.json"),
        ("--out .", "--out . is a folder; give a file in it, such as out.json"),
        ("--lengths 700 --context.max_tokens_per_slot 8", "700"),
        ("--lengths 40 --context.context_parallel_size 3", "parallel_size 3 does not divide 2 slots"),
        ("--lengths 40 --same 2x3", "--lengths and --same"),
        (
            "--context.mode free --parallel.ep 2",
            "context.mode is 'free', which needs parallel.ep 1, and parallel.ep is 2",
        ),
        ("--lengths 40000", "the model knows 32768 positions"),
        ("--train.mlp_tile_row 1", "did you mean '--train.mlp_tile_tokens'?"),
        ("--layers 3 --model.path nowhere", "nowhere"),
    ],
)
def test_bad_input(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--world", "2", *words.split()]) == 2
    assert message in capsys.readouterr().err


# ---- scripts of bench/


def attention_settings(**changes: Any) -> AttentionSettings:
    return attention_types.make_settings(AttentionFlags(**changes), 2, "gloo", ["bench"])


def test_flops_of_the_lower_half() -> None:
    assert forward_flops(attention_settings(heads=32, head_size=128), 16384) == 4 * 16384**2 * 32 * 128 / 2
    assert forward_flops(attention_settings(heads=1, head_size=1, documents=3), 10) == 2 * (16 + 9 + 9)
    assert forward_flops(attention_settings(heads=1, head_size=1, window=4), 10) == 4 * (10 * 4 - 8)
    assert forward_flops(attention_settings(heads=1, head_size=1, window=400), 10) == 2 * 100


def test_attention_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records" / "a.json"
    words = ["--world", "2", "--lengths", "96,130", "--repeats", "2", "--warmup", "1", "--documents", "2"]
    words += ["--partition", "contiguous"]
    assert attention_types.main([*words, "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(out.read_text())
    of_longspan = [row for row in record["rows"] if row["name"].startswith("longspan")]
    kinds = [f"longspan {kind}" for kind in ("p2p", "all_gather", "a2a", "a2a+p2p")]
    assert [(row["name"], row["length"]) for row in of_longspan] == [(kind, n) for kind in kinds for n in (96, 130)]
    assert all(row["seconds"] > row["forward_seconds"] > 0 and row["tflops_per_device"] > 0 for row in of_longspan)
    checks = {row["name"]: row for row in record["checks"]}
    assert checks["longspan p2p"]["good"] and checks["longspan p2p"]["errors"].keys() == {"output", "dq", "dk", "dv"}
    peers = [row for row in record["rows"] if "missing" in row]
    assert len(peers) == 4 and all(row["name"].startswith("torch context_parallel") for row in peers)
    assert {"machine", "versions"} <= record.keys()
    assert record["command"].startswith(f"python {attention_types.PROGRAM}")
    table = out.with_suffix(".md").read_text()
    assert table == attention_types.record_markdown(record) and "| longspan p2p | 96 |" in table
    contiguous = "float32, 2 packed documents, longspan's rows contiguous, kernel"
    assert contiguous in attention_types.record_text(record) and record["partition"] == "contiguous"
    assert "contiguous" not in attention_types.record_text(record | {"partition": "zigzag"})
    assert "not available: ValueError: its attention kernels run on CUDA only" in attention_types.record_text(record)


def test_bad_input_of_attention_types() -> None:
    for words, message in (
        ("--types p2p,ring", "--types 'p2p,ring': this release has p2p and all_gather and a2a and a2a+p2p"),
        ("--world 2 --hierarchical 2,2", "give two sizes whose product is the 2 ranks"),
        ("--lengths 16K", "--lengths '16K' is not a list of integers"),
        ("--world 2 --cuda-graph", "--cuda-graph needs a GPU for each rank; these 2 talk through gloo"),
        ("--lengths 0", "1 documents do not share 0 rows"),
        ("--dtyp x", "attention_types.py has no flag --dtyp: did you mean '--dtype'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            attention_types.main(words.split())


def test_a_case_on_four_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "eval.json"
    words = ["--world", "4", "--cases", "8k-tp2", "--preset", "qwen3-tiny", "--tokens", "32", "--layers", "1"]
    words += ["--vocabulary", "64", "--warmup", "0", "--repeats", "1", "--out", str(out), "--json"]
    assert evaluation_degrees.main(words) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record == json.loads(out.read_text()) and record["left_out"] == []
    (row,) = record["rows"]
    fixed, planned = row["runs"][:4], row["runs"][4:]
    ways = [(run["trained"], run["degree"], run["widest"]) for run in fixed]
    assert ways == [(1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 1, 1)]
    assert [run["micro_batches"] for run in fixed] == [2, 4, 4, 2] and planned
    assert all(run["tokens"] == 4 * 32 and run["mean"] == run["median"] == run["seconds"][0] for run in row["runs"])
    assert all(run["peak_bytes"] == 0 for run in row["runs"])  # of GPUs
    assert 0 < row["difference"] <= 1e-6 or fixed[0]["loss"] == fixed[1]["loss"]
    assert fixed[0]["loss"] > fixed[2]["loss"] == pytest.approx(planned[0]["loss"], rel=1e-6)  # a step between them
    assert out.with_suffix(".md").read_text() == evaluation_degrees.record_markdown(record)
    left = evaluation_degrees.record_text(record | {"left_out": ["8k-pp4"]})
    assert "Left out, for they need another number of ranks: 8k-pp4." in left


def test_evaluations_that_cannot_run() -> None:
    for flags, says in (
        (EvalBenchFlags(cases="9k"), "--cases has 9k; cases are 1k-tp2, 8k-tp2"),
        (EvalBenchFlags(cases="8k-pp4"), "none of the cases runs on 2 ranks; they need multiples of: 8k-pp4 4"),
        (EvalBenchFlags(documents=0), "--documents is 0"),
        (EvalBenchFlags(repeats=0), "--repeats 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            evaluation_degrees.make_settings(flags, 2, "gloo", ["bench"])


def test_the_bridge_beside_gathering_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bridge.json"
    words = ["--world", "2", "--rows", "24", "--hidden", "4", "--warmup", "0", "--repeats", "1", "--calls", "1"]
    assert bridge_time.main([*words, "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(out.read_text())
    rows = {row["layouts"]: row for row in record["rows"]}
    assert [*rows] == ["1·2 → 1·2·1", "2·1 → 1·2·1"]
    mib = 4 * 4 / 2**20
    assert rows["1·2 → 1·2·1"]["mib"]["gathering"] == [12 * mib, 24 * mib] and rows["2·1 → 1·2·1"]["mib"] == {
        "bridge": [0, 12 * mib],
        "gathering": [0, 24 * mib],
    }
    assert all(seconds > 0 for row in rows.values() for seconds in row["seconds"].values())
    assert out.with_suffix(".md").read_text() == bridge_time.record_markdown(record)


def test_bytes_of_the_page_are_those_of_the_record() -> None:
    root = Path(__file__).parents[2]
    page, record = ((root / name).read_text() for name in ("docs/bridge.md", "bench/records/bridge-bytes.md"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in record.splitlines() if " → " in line][1:]
    assert len(rows) == 4
    for name, _, _, width, gathering, bridge in rows:
        assert re.search(rf"^\| {name} \| .* \| {width} \| {gathering} \| {bridge} \|$", page, re.M), name

"""`longspan bench step`: all planners on two CPU processes, its arithmetic, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.bench.step.flags import StepFlags
from longspan.bench.step.profile_parts import kind_of, merged, parts_of
from longspan.bench.step.record import record_markdown, record_text
from longspan.bench.step.settings import Settings, make_settings
from longspan.bench.step.shapes import shape_named
from longspan.cli.main import main
from longspan.plan import Cost


def settings(ranks: int = 2, **changes: Any) -> Settings:
    return make_settings(StepFlags(**changes), ranks, "gloo", ["bench"])


def test_steps_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, cost = tmp_path / "records" / "s.json", tmp_path / "cost.json"
    cost.write_text(json.dumps(Cost(linear_seconds=1e-4).to_json()))
    words = ["--world", "2", "--lengths", "40,24,9,7", "--repeats", "1", "--warmup", "0", "--peers"]
    words += ["--max_tokens_per_slot", "40", "--cost", str(cost), "--out", str(out), "--recompute", "full"]
    assert main(["bench", "step", *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(out.read_text())
    *planned, peer = record["rows"]
    assert [row["name"] for row in planned] == ["longspan padded", "longspan fixed", "longspan dynamic"]
    assert max(row["loss"] for row in planned) == pytest.approx(min(row["loss"] for row in planned), rel=1e-6)
    for row in planned:
        assert row["seconds"] > 0 and row["prediction_ratio"] == row["predicted_seconds"] / row["seconds"]
        assert row["tokens_per_second_per_device"] == pytest.approx(80 / row["seconds"] / 2)
    assert "missing" in peer and {"machine", "versions", "command", "cost"} <= record.keys()
    table = out.with_suffix(".md").read_text()
    assert table == record_markdown(record) and "| longspan fixed |" in table
    assert "not available: ValueError: its attention kernels run on CUDA only" in record_text(record)


def test_experts_in_free_mode_and_without_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--planners",
        "dynamic",
        "--mode",
        "free",
        "--partition",
        "contiguous",
        "--optimizer",
        "",
        "--repeats",
        "1",
        "--warmup",
        "0",
        "--profile",
    ]
    experts = ["--experts", "4", "--experts_per_token", "2", "--expert_ffn", "16"]
    assert main(["bench", "step", "--world", "2", "--lengths", "40,24,9,7", *words, *experts, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["cost"]["closing_seconds"] > 0
    (row,) = record["rows"]
    assert sum(row["parts"].values()) >= 2 * row["parts"]["step"] > 0 and row["parts"]["attention"] > 0
    assert "exposed communication" in record_text(record)
    assert record["partition"] == "contiguous" and "auto, contiguous rows, at most" in record_text(record)


def test_tensor_parallel_ranks_share_the_cost_of_a_slot() -> None:
    one, two = (settings(2 * tp, tp=tp, mode="free", planners="fixed").cost for tp in (1, 2))
    assert (two.linear_seconds, two.ring_bytes) == (one.linear_seconds / 2, one.ring_bytes / 2)
    weights = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128) + 2 * 64 * 512
    half = settings(2, mode="free", planners="fixed", compute="bfloat16").cost
    for tp, each, cost in ((1, 8, one), (2, 8, two), (1, 6, half)):  # half of the bytes a weight are the other slot's
        assert cost.closing_seconds == pytest.approx(10e-3 + weights / tp * each / 2 / 350e9, rel=1e-12)


def test_recomputed_layers_are_in_the_cost() -> None:
    none, some, all_ = (settings(2, recompute=kind).cost for kind in ("none", "selective", "full"))
    assert none.linear_seconds < some.linear_seconds == all_.linear_seconds
    assert none.attention_seconds == some.attention_seconds < all_.attention_seconds


def test_the_record_says_which_kernels_and_norms_there_were(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    words = [
        "--lengths",
        "9,7",
        "--planners",
        "fixed",
        "--warmup",
        "0",
        "--repeats",
        "1",
        "--profile",
        "--out",
        str(out),
    ]
    assert main(["bench", "step", "--world", "1", *words, "--fused_norms", "off"]) == 0
    text = out.with_suffix(".md").read_text()
    assert "the model's own norms, float32" in text and "Longest kernels of longspan fixed:" in text
    (row,) = json.loads(out.read_text())["rows"]
    assert f"| `{row['kernels'][0]['name']}` | {row['kernels'][0]['part']} |" in text
    assert json.loads(out.read_text())["lengths"] == [9, 7]


def test_the_shape_that_goals_are_set_for() -> None:
    config = shape_named("qwen3-8b").config(131072)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (4096, 36, 128)
    experts = shape_named("qwen3-30b-a3b").changed(StepFlags(layers=4)).config(49152)
    assert (experts.num_experts, experts.num_experts_per_tok, experts.num_hidden_layers) == (128, 8, 4)
    assert experts.norm_topk_prob
    given = StepFlags(experts=4, experts_per_token=2, expert_ffn=24)
    assert shape_named("small").changed(given).config(64).moe_intermediate_size == 24


def test_one_sequence_over_all_ranks() -> None:
    found = settings(4, lengths="4096", planners="fixed", cp=4)
    (batch,) = found.plan("fixed").micro_batches
    assert [group.degree for group in batch.groups] == [4] and found.max_tokens_per_slot == 0


def test_sequences_are_timed_alone_each_over_all_slots() -> None:
    found = settings(4, sequences="4096,64", planners="fixed")
    assert found.cp == 4
    assert [(batch.lengths, batch.sequences) for batch in found.batches()] == [((4096,), ()), ((64,), ())]
    together = settings(4, lengths="4096,64", planners="fixed")
    assert together.batches() == [together]


@pytest.mark.parametrize(("cap", "cp"), [(1024, 4), (2048, 2), (4096, 1)])
def test_the_fixed_degree_is_the_smallest_that_holds_the_longest(cap: int, cp: int) -> None:
    assert settings(4, lengths="4096,10", max_tokens_per_slot=cap, planners="fixed").cp == cp


def test_gpus_compute_in_bfloat16_unless_told() -> None:
    flags = {"lengths": "40,24", "peak_tflops": 1.0, "planners": "fixed"}
    found = [
        make_settings(StepFlags(**flags, compute=c), 2, b, []).compute for b in ("gloo", "nccl") for c in ("", "x")
    ]
    assert found == ["", "x", "bfloat16", "x"]


def test_parts_add_up_and_count_once() -> None:
    events = [
        ("flash_fwd_kernel", 0.0, 2.0),
        ("ampere_bf16_gemm", 1.5, 3.0),
        ("ncclDevKernel_AllGather", 2.5, 4.0),
        ("multi_tensor_apply_kernel", 5.0, 5.5),
        ("Memcpy HtoD (Pinned -> Device)", 0.5, 1.0),
    ]
    found = parts_of(events, 6.0)
    assert found == {
        "attention": 2.0,
        "other layers": 1.0,
        "exposed communication": 1.0,
        "optimizer": 0.5,
        "idle": 1.5,
    }
    assert merged([(1, 2), (0, 1), (3, 4)]) == [(0, 2), (3, 4)]
    assert kind_of("void cudnn_generated_fort_native_sdpa_sm90_knob_7") == "attention"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--planners", "fixed,static"], "--planners 'fixed,static': this release has padded, fixed, dynamic"),
        (["--planners", ""], "--planners is empty and there is no --peers: nothing to time; name some of padded"),
        (["--shape", "qwen4"], "--shape 'qwen4' is unknown; use one of qwen3-8b"),
        (["--experts", "4"], "--experts 4 needs --experts_per_token and --expert_ffn"),
        (["--experts", "4", "--experts_per_token", "5", "--expert_ffn", "8"], "5 is more than --experts 4"),
        (["--ffn", "-8"], "--ffn is -8; it must be at least 0"),
        (["--tp", "0"], "--tp is 0; it must be at least 1"),
        (["--cp", "-2"], "--cp is -2; it must be at least 0"),
        (["--heads", "3"], "3 query heads do not divide by 2 key/value heads"),
        (["--repeats", "0"], "--repeats 0"),
        (["--out", "steps.md"], "--out steps.md: the record is JSON, its table goes beside it; give steps.json"),
        (["--out", "."], "--out . is a folder; give a file in it, such as out.json"),
        (["--lengths", "700", "--max_tokens_per_slot", "8"], "700 rows"),
        (["--lengths", "40", "--cp", "3"], "cp 3 does not divide 2 slots"),
        (["--lengths", "40", "--same", "2x3"], "--lengths and --same"),
        (["--mode", "free", "--ep", "2"], "--mode free with --ep 2"),
        (["--hierarchical", "2"], "--hierarchical '2': give two sizes"),
        (["--hierarchical", "2,x,1"], "--hierarchical '2,x,1': give two sizes"),
        (["--recomput", "x"], "longspan bench step has no flag --recomput: did you mean '--recompute'?"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--world", "2", *words]) == 2
    assert message in capsys.readouterr().err

"""Scripts of bench/ on a few CPU processes, and the peer of packed documents beside longspan's steps."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.attention import attention_types
from bench.attention.attention_types import AttentionFlags, AttentionSettings, forward_flops
from bench.evaluation import evaluation_degrees
from bench.evaluation.evaluation_degrees import EvalBenchFlags, make_settings
from bench.training.packed_peer import (
    _ATTENTION,
    CompiledLayers,
    PackedBatch,
    _attend_by_sdpa,
    _register_attention,
    pack_on_ranks,
)
from bench.training.step_peers import peer_cases
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from longspan.bench.step.command import main
from longspan.data.document import synthetic_documents
from longspan.errors import ConfigError
from longspan.layout.partition import NO_TARGET
from longspan.model.presets import preset_config
from tests.reference import relative_error


def settings(**changes: Any) -> AttentionSettings:
    return attention_types.make_settings(AttentionFlags(**changes), 2, "gloo", ["bench"])


def test_flops_of_the_lower_half() -> None:
    assert forward_flops(settings(heads=32, head_size=128), 16384) == 4 * 16384**2 * 32 * 128 / 2
    assert forward_flops(settings(heads=1, head_size=1, documents=3), 10) == 2 * (16 + 9 + 9)
    assert forward_flops(settings(heads=1, head_size=1, window=4), 10) == 4 * (10 * 4 - 8)
    assert forward_flops(settings(heads=1, head_size=1, window=400), 10) == 2 * 100


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


def test_bad_input() -> None:
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
            make_settings(flags, 2, "gloo", ["bench"])


@pytest.mark.whole
def test_one_sequence_has_both_peers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sequences", "40,24", "--planners", "fixed", "--repeats", "1", "--warmup", "0", "--json"]
    assert main(["--world", "1", *words], peer_cases) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    names, reasons = [row["name"] for row in rows], [row["missing"] for row in rows if "missing" in row]
    assert [name.split(" + ")[-1].split(" ")[0] for name in names[2:]] == ["torch", "compiled"] * 2
    assert len(reasons) == 2 and all("its attention kernels run on CUDA only" in reason for reason in reasons)
    for ours, packed in zip(rows[:2], rows[3::2], strict=True):
        assert packed["loss"] == pytest.approx(ours["loss"], rel=1e-6)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5), st.sampled_from([0, 50, 64]))
def test_every_document_is_whole_in_one_micro_batch(lengths: list[int], ranks: int, max_rows: int) -> None:
    if len(lengths) < ranks:
        with pytest.raises(ValueError, match=f"it cuts no document, and {len(lengths)} do not reach {ranks} ranks"):
            pack_on_ranks(lengths, ranks, max_rows)
        return
    packed = pack_on_ranks(lengths, ranks, max_rows)
    assert sorted(i for of_rank in packed for batch in of_rank for i in batch) == list(range(len(lengths)))
    assert len(packed) == ranks and len({len(of_rank) for of_rank in packed}) == 1
    assert not max_rows or all(sum(lengths[i] for i in batch) <= max_rows for of_rank in packed for batch in of_rank)
    with pytest.raises(ValueError, match="one of 65 rows is more than 64 a slot"):
        pack_on_ranks([65, *lengths], ranks, 64)


def test_attention_is_causal_within_documents() -> None:
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, heads, 8, generator=draws, dtype=torch.float64) for heads in (4, 2, 2))
    document = torch.tensor([0] * 7 + [1] * 5)
    allowed = (document[:, None] == document) & torch.ones(12, 12).tril().bool()
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense = F.scaled_dot_product_attention(*heads_first, attn_mask=allowed, scale=0.3, enable_gqa=True)
    out = _attend_by_sdpa(q, k, v, torch.tensor([0, 7, 12]), 7, 0.3)
    assert relative_error(out, dense[0].transpose(0, 1)) < 1e-14


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, which looks at a layer's input
def test_recomputed_layers_have_the_same_gradients() -> None:
    """Layers that are recomputed attend twice, the others once."""
    gradients, runs = list[Any](), list[int]()

    def attend(*arguments: Any) -> Tensor:
        runs.append(layers.recomputed)
        return _attend_by_sdpa(*arguments)

    _register_attention(attend)
    batch = PackedBatch.of(synthetic_documents([5, 3], 64), torch.device("cpu"))
    assert batch.labels[0, [4, 7]].tolist() == [NO_TARGET] * 2 and batch.positions[0].tolist() == [*range(5), *range(3)]
    assert batch.labels[0, :4].tolist() == batch.ids[0, 1:5].tolist() and batch.cu_seqlens.tolist() == [0, 5, 8]
    for recomputed in (0, 1, 2):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(preset_config("qwen3-tiny", vocab_size=64))
        model.set_attn_implementation(_ATTENTION)
        layers = CompiledLayers(model, "eager")
        layers.recomputed = recomputed
        model(**batch.model_arguments()).logits.float().square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert runs == [0] * 2 + [1] * 3 + [2] * 4
    assert all(map(torch.equal, gradients[0], gradients[1])) and all(map(torch.equal, gradients[0], gradients[2]))

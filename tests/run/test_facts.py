"""What a run says of itself: its facts in words, what its steps are compared with, the kernels of its layers."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from longspan.attention import AttendCall, Mask
from longspan.attention.call import Dropout
from longspan.comm import World
from longspan.config.sections import RunConfig, RunSection
from longspan.layout import Layout
from longspan.model import execution, load_model, prepare
from longspan.model.execution import Execution, model_execution
from longspan.plan import Cost, Machine, plan_fixed
from longspan.plan.shape.model_shape import ModelShape
from longspan.run.facts import RunFacts, facts_text
from longspan.run.records import mixers_text
from longspan.train import step_figures as figures_module
from longspan.train.step_figures import StepFigures, model_figures
from tests.report.runs import FACTS

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
}


def facts(**changes: Any) -> RunFacts:
    read = RunFacts.from_json(json.loads(json.dumps(FACTS)) | changes)
    assert read is not None
    return read


def test_the_lines_of_a_run_on_gpus() -> None:
    lines = dict(facts().lines())
    assert lines == {
        "model": "Qwen3-30B-A3B: 30.5 B parameters, 3.82 B on a rank, 8 of 128 experts a token",
        "precision": "parameters float32, compute bfloat16, gradients summed in float32",
        "devices": "16 x NVIDIA H200, 2 hosts, nccl; MFU is of 989 TFLOP/s each",
        "home": "8 slots, tp 2, ep 4, sequence-parallel",
        "attention": "p2p; kernel cudnn where each group has one document, else fa4",
        "plans": "dynamic, at most 32,768 rows a slot; evaluation fixed at cp 4; priced for the model on H200s",
        "data": "48,213 documents of 1,213,456,789 tokens, longest 131,072, 32 of them held out",
        "steps": "300, of which 100 are done, each of up to 262,144 tokens",
        "optimizer": "adamw, lr 1e-05 at most",
        "report": "runs/moe/report.html when the run ends; to watch it: longspan report runs/moe --follow",
    }
    resumed = dict(facts(sessions=[[0, 2], [9, 3], [1200, 1]]).lines())["resumed"]
    assert resumed == "at step 9 on 3 ranks, at step 1,200 on 1 rank"
    chosen = facts(evaluated="evaluation at cp 4, a2a: 32 documents in 0.2 s predicted; cp 1 0.5 s")
    assert ("evaluation", "at cp 4, a2a: 32 documents in 0.2 s predicted; cp 1 0.5 s") in chosen.lines()
    text = facts_text(facts()).splitlines()
    assert len({line.index(words) for line, words in zip(text, lines.values(), strict=True)}) == 1


def test_the_lines_of_a_run_on_cpus_and_what_is_not_known() -> None:
    told = {"device": "CPU", "ranks": 4, "hosts": 1, "cores": 2, "backend": "gloo", "peak_tflops": None}
    lines = dict(facts(**told, priced_for="", kernels=[], uncounted="no sizes", caution="slow").lines())
    assert lines["devices"] == "4 processes on 2 CPU cores, gloo" and "priced" not in lines["plans"]
    assert lines["attention"] == "p2p; kernel chosen in the first pass"
    assert (lines["no MFU"], lines["caution"]) == ("model FLOPs are not counted: no sizes", "slow")


def test_a_hybrid_says_what_its_partition_sends() -> None:
    hybrid = Execution(torch.float32, torch.float32, torch.float32, (), mixers=3)
    device = torch.device("cpu")
    text = mixers_text(hybrid, device, "zigzag")
    assert "two states a document and slot" in text and "contiguous" in text
    lines = dict(facts(mixers=mixers_text(hybrid, device, "contiguous"), rows="contiguous under a2a: 1 s").lines())
    assert lines["rows"] == "contiguous under a2a: 1 s"
    assert lines["mixers"].startswith("3 state-space layers in torch's operations; at most one state")
    assert mixers_text(replace(hybrid, mixers=0), device, "zigzag") == ""


def test_facts_of_another_release_are_left_out() -> None:
    assert RunFacts.from_json({}) is None and RunFacts.from_json({**FACTS, "more": 1}) is None


def test_figures_follow_from_the_plan_and_the_clock() -> None:
    shape = ModelShape(layers=2, weights=1000, query_width=64, key_width=32)
    plan = plan_fixed([10, 20], Layout(2), cp=2)
    figures = StepFigures(shape=shape, devices=2, peak=1e-6, priced_here=True)
    seconds = 0.5
    flops = 6 * 1000 * 30 + 12 * 64 * 2 * (55 + 210)
    assert figures.step_figures(plan, seconds) == {
        "tflops": pytest.approx(flops / seconds / 2 / 1e12, rel=1e-5),
        "mfu": pytest.approx(flops / seconds / 2 / 1e6, abs=1e-6),
        "predicted_seconds": round(plan.predicted_seconds, 6),
        "bound_share": round(plan.lower_bound_seconds / seconds, 6),
    }
    assert list(replace(figures, peak=None, priced_here=False).step_figures(plan, seconds)) == ["tflops"]
    assert replace(figures, shape=None, priced_here=False).step_figures(plan, seconds) == {}


@pytest.mark.parametrize(
    ("device", "cost", "file", "here"),
    [
        ("NVIDIA H200", Machine.known("H200").cost(CONFIG), "", True),
        ("NVIDIA A100-SXM4-80GB", Machine.known("H200").cost(CONFIG), "", False),
        ("NVIDIA A100-SXM4-80GB", Cost(), "measured.json", True),
        ("NVIDIA H200", Cost(), "", False),
        ("CPU", Machine.cpus().cost(CONFIG), "", False),
        ("CPU", Cost(), "measured.json", True),
    ],
)
def test_a_prediction_stands_beside_the_steps_of_its_own_machine_alone(
    device: str, cost: Cost, file: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_module, "device_name", lambda world: device)
    types = Execution(torch.float32, torch.bfloat16, torch.float32, ())
    model = cast(Any, SimpleNamespace(config=CONFIG, execution=types))
    world = cast(World, SimpleNamespace(home=Layout(2)))
    figures = model_figures(RunConfig(run=RunSection(machine=file)), model, world, cost)
    assert figures.priced_here is here
    assert (figures.peak is None) == (device == "CPU")
    unpriced = cast(Any, SimpleNamespace(config={**CONFIG, "mamba_d_state": 8}, execution=types))
    assert "state-space" in model_figures(RunConfig(), unpriced, world, cost).uncounted


def of_calls(*calls: AttendCall) -> Execution:
    return Execution(torch.float32, torch.float32, torch.float32, calls)


def test_kernels_are_said_by_kind_of_layer_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    full, window = AttendCall(1, 1, 64, 64), AttendCall(1, 1, 64, 64, mask=Mask(window=128))
    assert of_calls(full, window).kernels == ("cpu_flash",) and of_calls().kernels == ()
    dropout = replace(full, dropout=Dropout(0.1, seed=0))
    assert of_calls(dropout, window).kernels == (
        "reference (layers with full attention)",
        "cpu_flash (layers with window of 128)",
    )
    alone = {True: "cudnn", False: "fa4"}
    monkeypatch.setattr(execution, "choose_kernel", lambda call, name: SimpleNamespace(name=alone[call.one_document]))
    assert of_calls(full).kernels == ("cudnn where each group has one document, else fa4",)


def test_the_slow_kernel_on_gpus_is_a_caution() -> None:
    call = AttendCall(1, 1, 64, 64, torch.float32, torch.device("cuda"))
    assert of_calls(call).slow_reason() == "the slow reference kernel is all that can do float32, heads of 64 here"
    assert of_calls(AttendCall(1, 1, 64, 64, torch.float32)).slow_reason() == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prepared_model_says_what_it_computes_with(dtype: str) -> None:
    with World(Layout(1), backend="gloo") as world:
        model = load_model(preset="gpt-oss-tiny", vocab_size=64, dtype=dtype)
        computed = model_execution(prepare(model, world, compute_dtype=torch.bfloat16))
    assert computed.parameter_dtype == getattr(torch, dtype)
    assert (computed.compute_dtype, computed.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert {call.mask.window for call in computed.calls} == {None, model.config.sliding_window}

"""What a run says of itself: its facts in words, what its steps are compared with, the kernels of its layers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from longspan.attention import AttendCall, Mask
from longspan.attention.dropout import Dropout
from longspan.checkpoint.best import BestStep
from longspan.comm import World
from longspan.config.sections import RunConfig, RunSection
from longspan.layout import Layout
from longspan.model import execution, load_model, prepare
from longspan.model.execution import Execution, model_execution
from longspan.plan import Cost, Machine, plan_fixed
from longspan.plan.shape.model_shape import ModelShape
from longspan.run import collect_facts
from longspan.run.collect_facts import gradient_sums_text, mixers_text
from longspan.run.facts import RunFacts, TrainResult
from longspan.train import step_figures as figures_module
from longspan.train.step_figures import StepFigures, make_step_figures
from tests.report.runs import FACTS

CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
CONFIG["vocab_size"] = 512


def device_text(device: str, **figures: Any) -> str:
    world = SimpleNamespace(home=Layout(16, tp=2), node_size=4, device=torch.device(device))
    run: Any = SimpleNamespace(world=world, figures=SimpleNamespace(**{"peak": None, "uncounted": ""} | figures))
    return collect_facts._device_text(run)


def test_devices_on_gpus_and_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_facts, "world_device_name", lambda world: "NVIDIA H200")
    monkeypatch.setattr(collect_facts, "usable_cores", lambda: 2)
    assert device_text("cuda", peak=989.0) == "16 x NVIDIA H200, 2 hosts, nccl; MFU is of 989 TFLOP/s each"
    assert device_text("cuda", peak=989.0, uncounted="no sizes") == "16 x NVIDIA H200, 2 hosts, nccl"
    assert device_text("cpu") == "16 processes on 2 CPU cores, 2 hosts, gloo"


def test_the_texts_of_lines_stand_in_one_column() -> None:
    facts = RunFacts.from_json(FACTS)
    assert facts is not None
    data = ("data", "12 documents")  # was told before
    shown = replace(facts, lines=(*facts.lines, data)).text().splitlines()
    assert len({line.index(words) for line, (_, words) in zip(shown, facts.lines, strict=True)}) == 1


@pytest.mark.parametrize(("done", "words"), [(1, "goes on"), (2, "saves the model and makes the evaluations that are")])
def test_what_is_left_of_a_stopped_run(done: int, words: str) -> None:
    result = TrainResult(Path("run"), done, 2, "SIGTERM", 3.0, 300, ())
    assert f"stopped by SIGTERM after step {done} of 2; the same command {words}" in result.text()


@pytest.mark.parametrize(
    ("model_step", "rest"),
    [(0, " so far"), (1, "; model/ has its weights"), (2, "; model/ has the weights of step 2, the last")],
)
def test_the_result_names_the_best_step_and_whose_weights_are_saved(model_step: int, rest: str) -> None:
    best = "code/eval_loss", BestStep(1, 2.5)
    result = TrainResult(Path("run"), 2, 2, "", 3.0, 300, (), model_step=model_step, best=best)
    assert result.text().splitlines()[1] == f"step 1 is the best by code/eval_loss 2.5{rest}"


def test_a_hybrid_says_what_its_partition_sends() -> None:
    hybrid = Execution(torch.float32, torch.float32, torch.float32, (), mixers=3)
    device = torch.device("cpu")
    text = mixers_text(hybrid, device, "zigzag")
    assert "two states a document and slot" in text and "contiguous" in text
    text = mixers_text(hybrid, device, "contiguous")
    assert text.startswith("3 state-space layers in torch's operations; at most one state")


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
    monkeypatch.setattr(figures_module, "world_device_name", lambda world: device)
    types = Execution(torch.float32, torch.bfloat16, torch.float32, ())
    model = cast(Any, SimpleNamespace(config=CONFIG, execution=types))
    world = cast(World, SimpleNamespace(home=Layout(2)))
    figures = make_step_figures(RunConfig(run=RunSection(machine=file)), model, world, cost)
    assert figures.priced_here is here
    assert (figures.peak is None) == (device == "CPU")
    unpriced = cast(Any, SimpleNamespace(config={**CONFIG, "mamba_d_state": 8}, execution=types))
    assert "state-space" in make_step_figures(RunConfig(), unpriced, world, cost).uncounted


def of_calls(*calls: AttendCall) -> Execution:
    return Execution(torch.float32, torch.float32, torch.float32, calls)


def test_kernels_are_said_by_kind_of_layer_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    full, window = AttendCall(1, 1, 64, 64), AttendCall(1, 1, 64, 64, mask=Mask(window=128))
    assert of_calls(full, window).kernel_texts == ("cpu_flash",) and of_calls().kernel_texts == ()
    dropout = replace(full, dropout=Dropout(0.1, seed=0))
    of_layers = "reference (layers with full attention)", "cpu_flash (layers with window of 128)"
    assert of_calls(dropout, window).kernel_texts == of_layers
    alone = {True: "cudnn", False: "fa4"}
    monkeypatch.setattr(execution, "choose_kernel", lambda call, name: SimpleNamespace(name=alone[call.one_document]))
    assert of_calls(full).kernel_texts == ("cudnn where each group has one document, else fa4",)


def test_the_slow_kernel_on_gpus_is_a_caution() -> None:
    call = AttendCall(1, 1, 64, 64, torch.float32, torch.device("cuda"))
    reason = of_calls(call).slow_kernel_reason()
    assert reason == "the slow reference kernel is all that can do float32, heads of 64 here"
    assert of_calls(AttendCall(1, 1, 64, 64, torch.float32)).slow_kernel_reason() == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prepared_model_says_what_it_computes_with(dtype: str) -> None:
    with World(Layout(1), backend="gloo") as world:
        model = load_model(preset="gpt-oss-tiny", vocab_size=64, dtype=dtype)
        computed = model_execution(prepare(model, world, compute_dtype=torch.bfloat16))
    assert computed.parameter_dtype == getattr(torch, dtype)
    assert (computed.compute_dtype, computed.reduce_dtype) == (torch.bfloat16, torch.float32)
    over_batches = f"gradients summed in {dtype}"
    assert gradient_sums_text(computed, 1) == over_batches
    over_both = "gradients summed over slots in float32, over micro-batches in bfloat16"
    assert gradient_sums_text(computed, 2) == (over_both if dtype == "bfloat16" else over_batches)
    assert {call.mask.window for call in computed.calls} == {None, model.config.sliding_window}

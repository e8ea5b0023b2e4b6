"""`longspan bench calibrate`: the fit finds a machine that is known, and the command measures and writes one."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.bench.calibrate import fit
from longspan.bench.calibrate.command import (
    CalibrateFlags,
    calibration_text,
    fit_machine,
    make_calibration_settings,
    make_record,
)
from longspan.bench.calibrate.fit import Calibration, Sample, fit_samples, least_squares, mean_errors
from longspan.bench.calibrate.link_trials import GPU_SIZES, message_sizes
from longspan.bench.calibrate.ranks import Measured
from longspan.cli.main import main
from longspan.plan import AttentionCall, Group, Machine
from longspan.plan.cost.links import KINDS, LEVELS, SHARDED_KINDS, Level, Link, Wire
from longspan.plan.cost.model_cost import read_machine
from longspan.plan.shape.model_shape import ModelShape

CALL = AttentionCall(heads=32, kv_heads=8, head_dim=128)
SIZES = message_sizes(GPU_SIZES)


def _link(latency: float, speed: float) -> Link:
    """A link whose kinds all differ, with samples at the sizes that are measured."""
    kinds = {kind: (latency * (1 + i / 10), speed * (1 - i / 10)) for i, kind in enumerate((*KINDS, *SHARDED_KINDS))}
    return Link(
        **{
            kind: Wire(tuple((n, late + n / rate) for n in map(float, GPU_SIZES)))
            for kind, (late, rate) in kinds.items()
        }
    )


TRUTH = Calibration(
    Machine(
        device="NVIDIA Q100",
        product_flops_per_second=3e14,
        attention_flops_per_second=4e14,
        half_speed_rows=500.0,
        memory_bytes_per_second=2e12,
        step_seconds=80e-6,
        micro_batch_seconds=5e-3,
        layer_launch_seconds=2e-3,
        inside=_link(20e-6, 1.5e11),
        across=_link(200e-6, 3e9),
        node_size=4,
    ),
    step_seconds=2e-3,
    call_seconds=3e-4,
    pass_seconds=1e-5,
)
BASE = Machine(device="NVIDIA Q100", node_size=4)
LAYER_RATE = 532.15e12  # FLOP/s of a Qwen3-8B on it, layers with their passes over memory
FITTED = (
    "product_flops_per_second",
    "attention_flops_per_second",
    "half_speed_rows",
    "memory_bytes_per_second",
    "step_seconds",
    "micro_batch_seconds",
    "layer_launch_seconds",
)


def _steps() -> list[Sample]:
    sizes = [(1, 2048), (1, 4096), (1, 8192), (1, 16384), (2, 2048), (4, 2048)]
    flops = 2 * 7 * 4096 * 256.0  # of a token, in documents of 256
    return [
        Sample(
            part="step",
            name=f"step {m} {t}",
            steps=1,
            micro_batches=m,
            weight_flops=6 * 4e8 * m * t,
            attention_flops=flops * m * t,
            attention_flops_per_row=flops * m * t / 256,
            fitted=i % 3 != 2,
        )
        for i, (m, t) in enumerate(sizes)
    ]


def _kernels() -> list[Sample]:
    pieces = [(2048, 32768), (8192, 32768), (16384, 32768), (32768, 32768), (2048, 16384), (8192, 16384)]
    flops = [7.0 * 4096 * n * rows for n, rows in pieces]
    attention = [
        Sample(
            part="attention", name=f"{n}", attention_flops=f, attention_flops_per_row=f / n, calls=1, fitted=i % 3 != 2
        )
        for i, (f, (n, _)) in enumerate(zip(flops, pieces, strict=True))
    ]
    passes = [
        Sample(part="memory", name=f"{n}", calls=1, bytes=8.0 * n, fitted=i != 2)
        for i, n in enumerate((1 << 22, 1 << 24, 1 << 26, 1 << 28))
    ]
    return [*attention, *passes, Sample(part="launch", name="forward", layers=2)]


def _messages(levels: tuple[Level, ...]) -> list[Sample]:
    return [
        Sample(part="link", name=f"{kind} {level}", level=level, kind=kind, bytes=float(size), fitted=fitted)
        for level in levels
        for kind in (*KINDS, *SHARDED_KINDS)
        for size, fitted in SIZES
    ]


def _types(levels: tuple[Level, ...]) -> list[Sample]:
    return [
        Sample(
            part="type",
            name=f"{kind} {level}",
            level=level,
            group=Group(tuple(range(degree)), (0,), (length * degree,)),
            call=CALL,
            cp_comm_type=kind,
            fitted=i % 2 == 0,
        )
        for level, degree in zip(levels, (4, 8), strict=False)
        for i, length in enumerate((2048, 8192, 16384, 32768))
        for kind in ("p2p", "all_gather", "a2a")
    ]


def _unmeasured(levels: tuple[Level, ...] = LEVELS) -> list[Sample]:
    """Samples such as the ranks measure, with nothing measured yet."""
    return [*_steps(), *_kernels(), *_messages(levels), *_types(levels)]


def _measured(truth: Calibration = TRUTH, noise: float = 0.0, levels: tuple[Level, ...] = LEVELS) -> list[Sample]:
    random = np.random.default_rng(7)
    return [replace(s, seconds=truth.predict(s) * (1 + noise * random.standard_normal())) for s in _unmeasured(levels)]


def test_a_machine_is_found_where_nothing_disturbs() -> None:
    calibration = fit_samples(_measured(), BASE)
    machine = calibration.machine
    for name in FITTED:
        assert getattr(machine, name) == pytest.approx(getattr(TRUTH.machine, name), rel=1e-5), name
    for level in LEVELS:
        for kind, wire in getattr(TRUTH.machine, level).wires().items():
            assert np.array(getattr(getattr(machine, level), kind).samples) == pytest.approx(np.array(wire.samples))
    for name in ("step_seconds", "call_seconds", "pass_seconds"):
        assert getattr(calibration, name) == pytest.approx(getattr(TRUTH, name), rel=1e-4), name
    assert machine.fit_error is not None and machine.fit_error < 1e-6
    assert not machine.assumed and set(machine.assumed_parts) == {*fit.NEVER_MEASURED}


def test_a_machine_is_found_through_noise_and_its_error_is_that_of_what_was_held_out() -> None:
    samples = _measured(noise=0.02)
    calibration = fit_samples(samples, BASE)
    for name in FITTED[:2]:
        assert getattr(calibration.machine, name) == pytest.approx(getattr(TRUTH.machine, name), rel=0.05), name
    held_out = [sample for sample in samples if not sample.fitted]
    assert len(held_out) >= len(samples) / 4
    error = np.mean([abs(calibration.predict(s) / s.seconds - 1) for s in held_out])
    assert calibration.machine.fit_error == pytest.approx(error) and 0.005 < error < 0.05


def test_held_out_samples_decide_nothing_but_the_error() -> None:
    samples = _measured()
    wrong = [s if s.fitted else replace(s, seconds=2 * s.seconds) for s in samples]
    true, other = fit_samples(samples, BASE).machine, fit_samples(wrong, BASE).machine
    assert replace(other, fit_error=0.0) == replace(true, fit_error=0.0)
    assert other.fit_error == pytest.approx(0.5)
    assert set(mean_errors(fit_samples(wrong, BASE), wrong)) == {"step", "attention", "memory", "link", "type", "all"}


@pytest.mark.parametrize("name", FITTED)
def test_every_figure_is_told_from_the_others(name: str) -> None:
    truth = replace(TRUTH, machine=replace(TRUTH.machine, **{name: 3 * getattr(TRUTH.machine, name)}))
    machine = fit_samples(_measured(truth), BASE).machine
    for figure in FITTED:
        assert getattr(machine, figure) == pytest.approx(getattr(truth.machine, figure), rel=1e-4), figure


def test_on_one_host_and_on_one_rank_links_are_assumed() -> None:
    one_host = fit_samples(_measured(levels=("inside",)), BASE).machine
    assert one_host.across == BASE.across and one_host.inside != BASE.inside
    assert "across" in one_host.assumed_parts and "inside" not in one_host.assumed_parts
    one_rank = fit_samples(_measured(levels=()), BASE).machine
    assert (one_rank.inside, one_rank.step_seconds) == (BASE.inside, BASE.step_seconds)
    assert {"inside", "across", "step_seconds", "ring_wait_seconds"} <= set(one_rank.assumed_parts)


def test_what_is_never_measured_is_that_of_a_known_device_or_scaled() -> None:
    samples = _measured()
    known, other = fit_samples(samples, BASE, known=True).machine, fit_samples(samples, BASE).machine
    assert (known.scan_flops_per_second, known.channel_seconds) == (BASE.scan_flops_per_second, BASE.channel_seconds)
    assert other.scan_flops_per_second == pytest.approx(BASE.scan_flops_per_second * 3e14 / LAYER_RATE, rel=1e-3)
    assert other.channel_seconds == pytest.approx(2 * BASE.channel_seconds, rel=1e-4)


def test_wires_of_noisy_messages_rise() -> None:
    noisy = [(64.0, 3e-5), (1024.0, 1e-5), (65536.0, 4e-5), (1048576.0, 3e-5)]
    samples = Wire.fit(noisy).samples
    assert [size for size, _ in samples] == pytest.approx([256, 262144])
    assert [seconds for _, seconds in samples] == pytest.approx([math.sqrt(3e-10), math.sqrt(12e-10)])
    falling, mean = Wire.fit([(64.0, 3e-5), (4096.0, 1e-5)]), math.sqrt(3e-10)
    assert falling.seconds([1, 64, 4096, 8192]).tolist() == pytest.approx([mean, mean, mean, 2 * mean])


def test_least_squares_is_optimal() -> None:
    random = np.random.default_rng(3)
    bound = 0
    for _ in range(60):
        a, weights = random.standard_normal((9, 4)), random.uniform(0.5, 2, 9)
        b = a @ random.standard_normal(4) + random.standard_normal(9)
        x = np.array(least_squares(a, b, weights))
        slope = (a / weights[:, None]).T @ ((a @ x - b) / weights)  # Karush, Kuhn, Tucker
        assert (x >= 0).all() and (slope >= -1e-8).all() and np.abs(slope * x).max() < 1e-8
        bound += int((x == 0).any())
    assert 0 < bound < 60


def test_least_squares_of_nothing() -> None:
    assert least_squares(np.zeros((3, 2)), np.ones(3), np.ones(3)) == [0.0, 0.0]
    assert least_squares(np.zeros((0, 2)), np.zeros(0), np.zeros(0)) == [0.0, 0.0]


SMALL = ["--tokens=16,32,48", "--document=8", "--lengths=16,48", "--micro_batches=1,2", "--warmup=0", "--repeats=1"]


def test_two_ranks_write_a_machine_that_plans_are_priced_by(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "machine.json")
    assert main(["bench", "calibrate", "--world", "2", *SMALL, "--out", out, "--json"]) == 0
    printed = capfd.readouterr()
    record = json.loads(printed.out)
    assert f"wrote {out}\n" in printed.err and " s  types of attention: " in printed.err
    machine = read_machine(out, "--machine")
    assert isinstance(machine, Machine)
    assert machine == replace(Machine.from_json(record["measured"]), source=out)
    assert (machine.device, machine.world, machine.node_size, machine.assumed) == ("cpu", 2, 2, False)
    assert machine.date and machine.fit_error == pytest.approx(record["errors"]["all"])
    assert "across" in machine.assumed_parts and set(machine.inside.wires()) == {*KINDS, *SHARDED_KINDS}
    samples = record["samples"]
    parts = [sample["part"] for sample in samples]
    assert {part: parts.count(part) for part in dict.fromkeys(parts)} == {
        "step": 4, "launch": 1, "attention": 3, "memory": 4, "link": 6 * 6, "type": 2 * 3,
    }  # fmt: skip
    assert sum(not sample["fitted"] for sample in samples) >= len(samples) / 4
    for sample in samples:
        error = sample["predicted_seconds"] / sample["measured_seconds"] - 1
        assert sample["relative_error"] == pytest.approx(error)
    assert main(["plan", "--same", "4x100", "--slots", "4", "--cp", "2", "--machine", out, "--json"]) == 0
    cost = json.loads(capfd.readouterr().out)["cost"]
    assert cost["source"] == out and cost["linear_seconds"] > 0


def test_one_rank_in_words() -> None:
    samples = [*_measured(levels=()), Sample(part="product", name="product: 8 rows", seconds=1e-3, weight_flops=1e9)]
    settings = make_calibration_settings(CalibrateFlags(), 1, "gloo")
    measured = Measured(samples, "hosts: 1 of 1 ranks", "NVIDIA H100 80GB HBM3", 1, 12.0)
    calibration = fit_machine(measured, settings)
    text = calibration_text(make_record(calibration, measured, settings, ["longspan"]))
    lines = text.splitlines()
    assert lines[0].startswith("qwen3-tiny in float32 on 1 rank (gloo), ") and lines[1] == "hosts: 1 of 1 ranks"
    words = [line.split() for line in lines]
    assert ["product:", "8", "rows", "1"] in words
    assert ["micro_batch_seconds", "0.005"] in words and ["scan_flops_per_second", "6e+13", "assumed"] in words
    assert any(line.startswith("across point ") and line.endswith("assumed") for line in lines)
    assert lines[-3].startswith("held out: 5 of 17 measurements; mean error 0.0 %: step 0.0 %, attention 0.0 %")
    assert calibration.machine.device == "NVIDIA H100 80GB HBM3" and calibration.machine.world == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "64"], "--tokens '64' is not a list of two or more different counts"),
        (["--lengths", "64,64"], "--lengths '64,64' is not a list of two or more"),
        (["--micro_batches", "0,1"], "--micro_batches '0,1' is not"),
        (["--lengths", "short,long"], "--lengths 'short,long' is not"),
        (["--repeats", "0"], "--repeats 0 --warmup 1: at least 1 and 0"),
        (["--layers", "-1"], "--layers -1 --document 0: at least 0"),
        (["--layers", "2", "--model", "folder"], "--layers 2 and the weights of folder: use --preset"),
        (["--out", "no/such/folder/machine.json"], "there is no folder"),
        (["--out", "."], "--out . is a folder; give a file in it, such as out.json"),
    ],
)
def test_refused_before_ranks_start(flags: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "calibrate", "--world", "2", *flags]) == 2
    assert message in capfd.readouterr().err


def test_models_and_presets_that_flags_name_have_all_their_layers() -> None:
    for flags in (CalibrateFlags(model="folder"), CalibrateFlags(preset="qwen3-8b")):
        assert make_calibration_settings(flags, 2, "nccl").layers == 0
    assert make_calibration_settings(CalibrateFlags(), 2, "nccl").layers == 2


def test_rates_of_a_model_are_those_of_its_weights() -> None:
    import torch

    from longspan.bench.calibrate.ranks import Shape
    from longspan.model import load_model

    model: Any = load_model(preset="qwen3-tiny", vocab_size=2048)
    shape = Shape.of(model, torch.float32)
    assert shape.weight_flops == 6 * ModelShape.of(model.config).weights
    assert (shape.full_layers, shape.layers, shape.heads, shape.kv_heads) == (2, 2, 8, 4)
    # 7 products of rows by rows for each head, of the pairs below the diagonal
    assert shape.flops(100.0**2) == 7 * 2 * shape.heads * shape.head_dim * 100.0**2 / 2

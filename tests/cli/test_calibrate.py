"""`longspan bench calibrate`: the fit finds a machine that is known, and the command measures and writes one."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from longspan.bench import calibrate
from longspan.bench.calibrate import (
    MESSAGE_BYTES,
    CalibrateFlags,
    CalibrationSample,
    CalibrationSizes,
    Measurements,
    calibrate_on_rank,
    calibration_text,
    fit_machine,
    fit_samples,
    least_squares,
    make_record,
)
from longspan.cli.main import main
from longspan.plan import Machine
from longspan.plan.cost.links import KINDS, LEVELS, Level, Link, Wire
from longspan.plan.cost.machine import LAYER_BYTES, read_machine
from longspan.testing import run_ranks


def _link(latency: float, speed: float) -> Link:
    return Link(**{k: Wire(latency * (1 + i / 10), speed * (1 - i / 10)) for i, k in enumerate(KINDS)})


SPEEDS = {"product_flops_per_second": 3e14, "attention_flops_per_second": 4e14, "memory_bytes_per_second": 2e12}
SECONDS = {"micro_batch_seconds": 5e-3, "layer_seconds": 6e-3, "group_seconds": 0.2e-3, "document_seconds": 5e-6}
LINKS: dict[str, Any] = {"inside": _link(20e-6, 1.5e11), "across": _link(200e-6, 3e9)}
TRUTH = Machine(device="NVIDIA Q100", node_size=4, half_speed_rows=500.0, **SPEEDS, **SECONDS, **LINKS)
STEP, CALL_SECONDS, PASS = 2e-3, 3e-4, 1e-5  # of a step, a call of attention and a pass, besides what they count
BASE = Machine(device="NVIDIA Q100", node_size=4)
NOT_MEASURED = {"expert_flops_per_second", "host_copy_bytes_per_second", "step_seconds"}
FITTED = tuple(name for name in BASE.float_fields() if name not in NOT_MEASURED)


def _measured(
    truth: Machine = TRUTH, noise: float = 0.0, levels: tuple[Level, ...] = LEVELS
) -> list[CalibrationSample]:
    samples: list[CalibrationSample] = []

    def attention_seconds(flops: float, a_row: float) -> float:
        return (flops + truth.half_speed_rows * a_row) / truth.attention_flops_per_second

    for m, t in ((1, 2048), (1, 4096), (1, 8192), (1, 16384), (2, 2048), (4, 2048)):
        counts = {"steps": 1.0, "micro-batches": m, "flops": 6 * 4e8 * m * t, "passes": 2 * 4096.0 * m * t}
        counts |= {"attention flops": 2 * 7 * 4096 * 256.0 * m * t, "attention flops a row": 2 * 7 * 4096.0 * m * t}
        seconds = STEP + m * truth.micro_batch_seconds + counts["flops"] / truth.product_flops_per_second
        seconds += attention_seconds(counts["attention flops"], counts["attention flops a row"])
        seconds += counts["passes"] * LAYER_BYTES / truth.memory_bytes_per_second
        samples.append(CalibrationSample(part="step", name=f"step {m} {t}", seconds=seconds, counts=counts))
    for m, groups, documents in ((1, 1, 1), (4, 1, 1), (1, 1, 4), (1, 4, 4)):
        counts = {"steps": 1.0, "layers": 2.0 * m, "groups": 2.0 * m * groups, "documents": 2.0 * m * documents}
        prices = (STEP, truth.layer_seconds, truth.group_seconds, truth.document_seconds)
        seconds = sum(n * price for n, price in zip(counts.values(), prices, strict=True))
        samples.append(
            CalibrationSample(part="host", name=f"host {m} {groups} {documents}", seconds=seconds, counts=counts)
        )
    for n, rows in ((2048, 32768), (8192, 32768), (32768, 32768), (2048, 16384), (8192, 16384)):
        flops = 7.0 * 4096 * n * rows
        counts = {"calls": 1.0, "flops": flops, "flops a row": flops / n}
        seconds = CALL_SECONDS + attention_seconds(flops, flops / n)
        samples.append(
            CalibrationSample(part="attention", name=f"attention {n} {rows}", seconds=seconds, counts=counts)
        )
    for n in (1 << 22, 1 << 24, 1 << 26, 1 << 28):
        counts = {"calls": 1.0, "bytes": 8.0 * n}
        seconds = PASS + counts["bytes"] / truth.memory_bytes_per_second
        samples.append(CalibrationSample(part="memory", name=f"memory {n}", seconds=seconds, counts=counts))
    for level in levels:
        for kind, wire in getattr(truth, level).wires().items():
            for size in MESSAGE_BYTES["cuda"]:
                counts, name = {"messages": 1.0, "bytes": float(size)}, f"{kind} {level} {size}"
                seconds = float(wire.seconds(size))
                samples.append(
                    CalibrationSample(part="link", name=name, seconds=seconds, counts=counts, level=level, kind=kind)
                )
    random = np.random.default_rng(7)
    return [replace(s, seconds=s.seconds * (1 + noise * random.standard_normal())) for s in samples]


def test_a_machine_is_found_where_nothing_disturbs() -> None:
    calibration = fit_samples(_measured(), BASE)
    machine = calibration.machine
    for name in FITTED:
        assert getattr(machine, name) == pytest.approx(getattr(TRUTH, name), rel=1e-4), name
    for level in LEVELS:
        for kind, wire in getattr(TRUTH, level).wires().items():
            found = getattr(getattr(machine, level), kind)
            assert (found.latency, found.bytes_per_second) == pytest.approx((wire.latency, wire.bytes_per_second))
    assert calibration.mean_error < 1e-5
    assert not machine.assumed and {*machine.assumed_parts} == NOT_MEASURED


def test_every_figure_is_told_from_the_others_through_noise_too() -> None:
    for name in FITTED:
        truth = replace(TRUTH, **{name: 3 * getattr(TRUTH, name)})
        machine = fit_samples(_measured(truth), BASE).machine
        for figure in FITTED:
            assert getattr(machine, figure) == pytest.approx(getattr(truth, figure), rel=1e-3), (name, figure)
    calibration = fit_samples(_measured(noise=0.02), BASE)
    for name in FITTED[:2]:
        assert getattr(calibration.machine, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
    assert 0.003 < calibration.mean_error < 0.03


def test_on_one_host_and_on_one_rank_links_are_assumed() -> None:
    one_host = fit_samples(_measured(levels=("inside",)), BASE).machine
    assert one_host.across == BASE.across and one_host.inside != BASE.inside
    assert "across" in one_host.assumed_parts and "inside" not in one_host.assumed_parts
    one_rank = fit_samples(_measured(levels=()), BASE).machine
    assert one_rank.inside == BASE.inside and {"inside", "across"} <= set(one_rank.assumed_parts)


def test_experts_of_an_unknown_device_are_as_much_faster_as_its_products() -> None:
    known, other = (fit_samples(_measured(), BASE, device_is_known=known).machine for known in (True, False))
    assert known.expert_flops_per_second == BASE.expert_flops_per_second
    assert other.expert_flops_per_second == pytest.approx(BASE.expert_flops_per_second * 3e14 / 700e12)


def test_messages_whose_bytes_take_no_time_have_a_speed() -> None:
    samples = [replace(s, seconds=1e-3) if s.part == "link" else s for s in _measured(levels=("inside",))]
    point = fit_samples(samples, BASE).machine.inside.point
    assert point.latency == pytest.approx(1e-3)
    assert float(point.seconds(MESSAGE_BYTES["cuda"][-1])) == pytest.approx(1.1e-3)


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
    assert least_squares(np.zeros((3, 2)), np.ones(3), np.ones(3)) == [0.0, 0.0]
    assert least_squares(np.zeros((0, 2)), np.zeros(0), np.zeros(0)) == [0.0, 0.0]


def _calibrate_two_hosts(rank: int, flags: CalibrateFlags, ranks: int, backend: str) -> Measurements:
    os.environ["LOCAL_WORLD_SIZE"] = "2"

    def sum_gradients(*_: object) -> None:
        raise AssertionError("a step that is measured sums gradients between the hosts")

    small = CalibrationSizes("qwen3-tiny", "float32", (32, 64, 96, 128), 16, (16, 32, 64, 128))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(calibrate.SIZES, "cpu", small)
        patch.setattr(calibrate, "LAYERS", 1)
        patch.setattr(calibrate, "TURNS", {})
        patch.setattr(_fsdp_param_group, "foreach_reduce", sum_gradients)
        return calibrate_on_rank(rank, flags, ranks, backend)


MODEL = ("--gpu-bytes", "85899345920", "--model.preset", "qwen3-tiny")


def test_two_hosts_write_a_machine_that_plans_are_priced_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "run_on_ranks", lambda _, args, n: run_ranks(_calibrate_two_hosts, n, *args)[0])
    out = str(tmp_path / "machine.json")
    assert main(["bench", "calibrate", "--world", "4", "--warmup=0", "--repeats=1", "--out", out, "--json"]) == 0
    printed = capfd.readouterr()
    record = json.loads(printed.out)
    assert f"wrote {out}\n" in printed.err and " s  messages between slots: " in printed.err
    machine = read_machine(out, "--machine")
    assert machine == replace(Machine.from_json(record["measured"]), source=out)
    assert (machine.device, machine.world, machine.node_size, machine.assumed) == ("cpu", 4, 2, False)
    assert machine.date and not {"inside", "across"} & {*machine.assumed_parts}
    parts = Counter(sample["part"] for sample in record["samples"])
    assert parts == {"step": 6, "host": 4, "attention": 7, "memory": 4, "link": 2 * 3 * 4}
    errors = [abs(s["fitted_seconds"] / s["measured_seconds"] - 1) for s in record["samples"]]
    assert record["mean_error"] == pytest.approx(np.mean(errors))
    assert main(["plan", "--same", "4x100", "--slots", "4", "--cp", "2", "--machine", out, *MODEL, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    words = ["plan", "--same", "4x100", "--slots", "4", "--cp", "2", "--gpu", "h100", *MODEL, "--json"]
    assert main(words) == 0
    of_h100 = json.loads(capfd.readouterr().out)
    assert answer["gpu"] == "GPU of 85,899,345,920 bytes" and answer["gpus"] == 4
    assert answer["seconds"] > of_h100["seconds"] > 0  # the CPUs that were measured are slower


def test_one_rank_in_words() -> None:
    measured = Measurements(_measured(levels=()), "NVIDIA H100 80GB HBM3", 1, 12.0)
    calibration = fit_machine(measured, 1, "gloo")
    lines = calibration_text(make_record(calibration, measured, {"ranks": 1, "backend": "gloo"})).splitlines()
    assert lines[0].startswith("qwen3-tiny (2 layers) in float32 on 1 rank (gloo), hosts of 1 as the launcher counts")
    words = [line.split() for line in lines]
    assert ["micro_batch_seconds", "0.005"] in words and ["layer_seconds", "0.006"] in words
    assert any(line.startswith("across point ") and line.endswith("assumed") for line in lines)
    assert lines[-1] == "mean error of the fit 0.0 %, measured in 12 s"
    assert calibration.machine.device == "NVIDIA H100 80GB HBM3" and calibration.machine.world == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeats", "0"], "--repeats 0 --warmup 1: at least 1 and 0"),
        (["--out", "no/such/folder/machine.json"], "there is no folder"),
        (["--out", "."], "--out . is a folder; give a file in it, such as out.json"),
    ],
)
def test_refused_before_ranks_start(flags: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "calibrate", "--world", "2", *flags]) == 2
    assert message in capfd.readouterr().err

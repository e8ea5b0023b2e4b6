"""`longspan bench calibrate`: the fit finds constants that are known, and the command measures and writes them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from longspan.bench.calibrate import ranks
from longspan.bench.calibrate.command import CalibrateFlags, make_record, make_settings, record_text
from longspan.bench.calibrate.fit import Calibration, Sample, calibrate, least_squares
from longspan.cli.main import main
from longspan.layout import Layout
from longspan.plan import Cost
from longspan.plan.cost.model_cost import read_cost

COST = Cost(
    linear_seconds=3e-6,
    attention_seconds=2e-9,
    ring_bytes=4608.0,
    inside_bytes_per_second=2e9,
    across_bytes_per_second=1e9,
    ring_step_seconds=4e-4,
    micro_batch_seconds=5e-3,
)
TRUTH = Calibration(COST, step_seconds=2e-3, call_seconds=3e-4, wire_step_seconds=1e-4, ring_measured=True)
LENGTHS = (256, 1024, 4096, 16384)


def _unmeasured(*, ring: bool = True) -> list[Sample]:
    """Samples such as the ranks measure, of slots in pairs, with nothing measured yet."""
    samples = [
        Sample(name="step", seconds=1, steps=1, micro_batches=m, tokens=m * t, squares=m * t * 32)
        for m, t in ((1, 256), (1, 1024), (1, 4096), (2, 256), (4, 256))
    ]
    samples += [Sample(name="attention", seconds=1, squares=n * n, calls=1) for n in LENGTHS]
    if ring:
        wire = [Sample(name="wire", seconds=1, wire_steps=1, wire_bytes=n * 1536.0) for n in (1, *LENGTHS, 65536)]
        around = [
            Sample(name="ring", seconds=1, squares=n * n / 2, calls=1, ring_steps=1, ring_bytes=4608 * n / 2)
            for n in LENGTHS
        ]
        samples += [*wire, *around]
    return samples


def _measured(truth: Calibration, noise: float = 0.0, *, ring: bool = True) -> list[Sample]:
    random = np.random.default_rng(7)
    samples = _unmeasured(ring=ring)
    return [replace(s, seconds=truth.predict(s) * (1 + noise * random.standard_normal())) for s in samples]


def test_constants_are_found_where_nothing_disturbs() -> None:
    calibration = calibrate(_measured(TRUTH), ring_bytes=4608.0, across_bytes_per_second=1e9)
    for name, value in COST.constants().items():
        assert calibration.cost.constants()[name] == pytest.approx(value, rel=1e-6), name
    assert calibration.step_seconds == pytest.approx(TRUTH.step_seconds, rel=1e-6)
    assert calibration.call_seconds == pytest.approx(TRUTH.call_seconds, rel=1e-6)
    assert calibration.wire_step_seconds == pytest.approx(TRUTH.wire_step_seconds, rel=1e-6)
    assert max(abs(calibration.relative_error(sample)) for sample in _measured(TRUTH)) < 1e-6


def test_constants_are_found_through_noise() -> None:
    samples = _measured(TRUTH, noise=0.02)
    calibration = calibrate(samples, ring_bytes=4608.0, across_bytes_per_second=1e9)
    for name, value in COST.constants().items():
        assert calibration.cost.constants()[name] == pytest.approx(value, rel=0.12), name
    assert max(abs(calibration.relative_error(sample)) for sample in samples) < 0.1


@pytest.mark.parametrize(
    "name", sorted({*COST.constants()} - {"ring_bytes", "exchange_bytes", "across_bytes_per_second"})
)
def test_every_constant_is_told_from_the_others(name: str) -> None:
    truth = replace(TRUTH, cost=replace(COST, **{name: 3 * getattr(COST, name)}))
    calibration = calibrate(_measured(truth), ring_bytes=4608.0, across_bytes_per_second=1e9)
    for key, value in truth.cost.constants().items():
        assert calibration.cost.constants()[key] == pytest.approx(value, rel=1e-6), key


def test_samples_that_only_check_decide_nothing() -> None:
    wrong = [replace(sample, seconds=100.0, fitted=False) for sample in _unmeasured()]
    assert calibrate([*_measured(TRUTH), *wrong], ring_bytes=1.0) == calibrate(_measured(TRUTH), ring_bytes=1.0)


def test_where_no_ring_was_measured_its_constants_are_the_defaults() -> None:
    calibration = calibrate(_measured(TRUTH, ring=False), ring_bytes=4608.0)
    assert not calibration.ring_measured
    assert calibration.cost.attention_seconds == pytest.approx(COST.attention_seconds, rel=1e-6)
    for name in ("inside_bytes_per_second", "across_bytes_per_second", "ring_step_seconds"):
        assert getattr(calibration.cost, name) == getattr(Cost(), name)


@pytest.mark.parametrize(("inside", "across", "expected"), [(2e9, 0.0, 2e9), (9e11, 0.0, 40e9), (9e11, 5e9, 5e9)])
def test_links_between_hosts(inside: float, across: float, expected: float) -> None:
    truth = replace(TRUTH, cost=replace(COST, inside_bytes_per_second=inside))
    calibration = calibrate(_measured(truth), ring_bytes=4608.0, across_bytes_per_second=across)
    assert calibration.cost.across_bytes_per_second == pytest.approx(expected, rel=1e-6)


def test_no_constant_is_negative() -> None:
    faster = [replace(s, seconds=s.seconds / (10 if s.ring_steps else 1)) for s in _measured(TRUTH)]
    assert calibrate(faster, ring_bytes=4608.0).cost.ring_step_seconds == 0.0


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


SMALL = ["--tokens=16,32", "--document=8", "--lengths=16,48", "--micro_batches=1,2", "--warmup=0", "--repeats=1"]


def test_two_ranks_write_a_cost_that_plans_are_priced_by(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "cost.json")
    assert main(["bench", "calibrate", "--world", "2", *SMALL, "--out", out, "--json"]) == 0
    printed = capfd.readouterr()
    record = json.loads(printed.out)
    assert printed.err == f"wrote {out}\n"
    cost = read_cost(out, "--machine")
    assert cost == Cost.from_json(record["cost"]) and record["ring_measured"]
    assert (cost.ring_bytes, cost.exchange_bytes) == (2 * 3 * 2 * 96 * 4, 2 * 2 * 2 * (192 + 96) * 4)
    samples = record["samples"]
    kinds = [sample["what"].split(":")[0] for sample in samples]
    assert [kinds.count(kind) for kind in ("step", "attention", "wire")] == [3 + 2, 2 + 2, 4]
    assert [sample["fitted"] for sample in samples] == [True] * 11 + [False] * 2
    assert all(sample["measured_seconds"] > 0 for sample in samples)
    for sample in samples:
        error = sample["predicted_seconds"] / sample["measured_seconds"] - 1
        assert sample["relative_error"] == pytest.approx(error)
    assert main(["plan", "--same", "4x100", "--slots", "4", "--cp", "2", "--machine", out, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["cost"] == record["cost"] | {"source": out}


def test_a_ring_of_two_sends_half_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "bind", lambda *_: None)
    monkeypatch.setattr(ranks._Bench, "_attend", lambda *_: None)
    bench: Any = object.__new__(ranks._Bench)
    bench.world = SimpleNamespace(home=Layout(4), prepare=lambda plan: None)
    bench.shape = ranks.Shape(4, 2, 8, 2, 64, torch.float32)  # two of four layers see all rows
    sample = bench._attention(1000, 2).sample
    assert (sample.calls, sample.squares, sample.ring_steps) == (1, 1000**2 / 2, 1)
    assert sample.ring_bytes == bench.shape.ring_bytes * (1000 / 2) * (2 / 4)


def test_one_rank_in_words() -> None:
    samples = [*_measured(TRUTH, ring=False), Sample(name="step: a document", seconds=0.5, steps=1, fitted=False)]
    settings = make_settings(CalibrateFlags(), 1, "gloo")
    calibration = calibrate(samples, ring_bytes=4608.0)
    lines = record_text(make_record(calibration, samples, settings, ["longspan"])).splitlines()
    assert lines[0].startswith("qwen3-tiny in float32 on 1 rank (gloo), ")
    assert lines[2].split() == ["what", "measured", "ms", "predicted", "ms", "error"]
    assert lines[3].split()[:3] == ["step", "7.78", "7.78"]
    assert "fitted: 9 measurements, error 0.0 % median, 0.0 % most" in lines
    assert "predicted alone: 1 measurements, error 99.6 % median, 99.6 % most" in lines
    assert ["micro_batch_seconds", "0.005"] in [line.split() for line in lines]
    assert lines[-1] == "no ring was measured: the ring's constants are Cost's defaults"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "64"], "--tokens '64' is not a list of two or more different counts"),
        (["--lengths", "64,64"], "--lengths '64,64' is not a list of two or more"),
        (["--micro_batches", "0,1"], "--micro_batches '0,1' is not"),
        (["--lengths", "short,long"], "--lengths 'short,long' is not"),
        (["--repeats", "0"], "--repeats 0 --warmup 1: at least 1 and 0"),
        (["--across_gbps", "-1"], "--across_gbps -1.0"),
        (["--out", "no/such/folder/cost.json"], "there is no folder"),
        (["--out", "."], "--out . is a folder; give a file in it, such as out.json"),
    ],
)
def test_refused_before_ranks_start(flags: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "calibrate", "--world", "2", *flags]) == 2
    assert message in capfd.readouterr().err


def test_on_one_host_only(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "calibrate"]) == 2
    assert "8 processes, 4 of them on this host; calibrate on one host" in capfd.readouterr().err

"""The fit of a machine's figures to measured rows: it finds known figures again, and never looks at held-out rows."""

from collections.abc import Callable
from typing import Any

import pytest

from longspan import Group, Layout, plan_fixed
from longspan.plan import AttentionCall, CostSettings, Machine, PlanOptions
from tests.plan.cost.test_predictions import BENCH

MACHINE = Machine.known("H200")
NAMES = ("product_flops_per_second", "attention_flops_per_second", "layer_pass_seconds")


@pytest.fixture(scope="module")
def bench() -> Any:
    """The module bench/plans/fit_figures.py, which imports its neighbours by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH / "plans"))
        import fit_figures  # pyright: ignore[reportMissingImports]

        return fit_figures  # pyright: ignore[reportUnknownVariableType]


def step_predictor(hidden: int, lengths: list[int], slots: int) -> Callable[[Machine], float]:
    """Predicted seconds of a dense step of 8 layers of this width."""
    config = {"hidden_size": hidden, "num_hidden_layers": 8, "num_attention_heads": hidden // 128, "head_dim": 128}
    config |= {"num_key_value_heads": 8, "intermediate_size": 3 * hidden, "vocab_size": 151936}

    def predict(machine: Machine) -> float:
        options = PlanOptions(cost=machine.cost(config, CostSettings(shards=slots)))
        return plan_fixed(lengths, Layout(slots), slots, options=options).predicted_seconds

    return predict


def layer_predictor(length: int) -> Callable[[Machine], float]:
    """Predicted seconds of one layer's attention of this sequence over 4 slots under all_gather."""
    group, call = Group((0, 1, 2, 3), (0,), (length,)), AttentionCall(heads=32, kv_heads=8, head_dim=128)
    return lambda machine: machine.attention_seconds(group, call, node_size=8)["all_gather"].seconds


DOCUMENTS = (([4096] * 4, 1), ([16384], 1), ([65536], 2), ([131072], 4), ([8192] * 4, 4), ([32768], 2))
STEPS = [step_predictor(hidden, lengths, slots) for hidden in (1024, 4096) for lengths, slots in DOCUMENTS]
LAYERS = [layer_predictor(length) for length in (4096, 8192, 16384)]


def predictions_of(
    bench: Any, truth: Machine, predictors: list[Callable[[Machine], float]] = STEPS, *, held_out: float = 1.0
) -> list[Any]:
    """Rows whose measured seconds are those of `truth`; of every third, which is held out, `held_out` times."""
    from measured import Measured  # pyright: ignore[reportMissingImports]

    words = dict.fromkeys(("name", "model", "rows", "kind", "settings"), "synthetic")
    predictions = list[Any]()
    for number, predict in enumerate(predictors):
        use = "fitted" if number % 3 else "held out"
        seconds = predict(truth) * (1.0 if use == "fitted" else held_out)
        row = Measured(record="synthetic-H200", slots=4, seconds=seconds, predict=predict, **words)
        predictions.append(bench.Prediction(row, predict(MACHINE), use))
    return predictions


def test_a_known_figure_is_found_again(bench: Any) -> None:
    slower = bench.replace_figures(MACHINE, {"product_flops_per_second": 0.95 * 700e12})
    lines, names = list[str](), [*NAMES[:2], "wave_seconds"]
    fit = bench.fit_figures(predictions_of(bench, slower), MACHINE, names, report=lines.append)
    assert fit.fitted == pytest.approx({name: getattr(slower, name) for name in names}, rel=0.005)
    assert fit.unused == ("wave_seconds",) and fit.fitted["wave_seconds"] == MACHINE.wave_seconds
    assert lines[0].startswith("8 fitted rows, 3 figures") and lines[1].startswith("round 1: ")
    table = {row[0]: row[1:] for row in bench.figure_rows(fit)}
    cells = ("7e+14", "6.66e+14", "-4.9%", "8", "8")  # the pull towards the present figure is seen
    assert table["product_flops_per_second"] == cells
    assert "no fitted row depends on it" in table["wave_seconds"][2]


def test_known_figures_are_found_together(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PULL", 1e-4)  # rows of products and of passes differ little
    figures = {"product_flops_per_second": 665e12, "attention_flops_per_second": 655e12, "layer_pass_seconds": 143e-12}
    slower = bench.replace_figures(MACHINE, figures)
    fit = bench.fit_figures(predictions_of(bench, slower), MACHINE, NAMES, report=lambda line: None)
    assert fit.fitted == pytest.approx(figures, rel=0.005)


def test_links_inside_a_host_are_found_again(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PULL", 1e-4)  # messages are a small part of a layer
    slower = bench.replace_figures(MACHINE, {"inside": 150e9})
    assert slower.inside.gather.bytes_per_second == pytest.approx(1.14 * 150e9) and slower.across == MACHINE.across
    predictions = predictions_of(bench, slower, LAYERS)
    fit = bench.fit_figures(predictions, MACHINE, ["inside"], report=lambda line: None)
    assert fit.fitted == pytest.approx({"inside": 150e9}, rel=0.005) and not fit.unused


def test_held_out_rows_change_nothing(bench: Any) -> None:
    slower = bench.replace_figures(MACHINE, {"product_flops_per_second": 660e12})
    fits, reports = list[Any](), list[list[str]]()
    for held_out in (1.0, 1.0, 1.5):
        reports.append([])
        predictions = predictions_of(bench, slower, held_out=held_out)
        fits.append(bench.fit_figures(predictions, MACHINE, NAMES[:2], rounds=2, report=reports[-1].append))
    assert fits[0].fitted == fits[1].fitted == fits[2].fitted and reports[0] == reports[1] == reports[2]
    errors = list(bench.error_rows(predictions, predictions))
    assert [row[0] for row in errors] == ["fitted, H200"] * 2 + ["held out, H200"] * 2
    assert errors[2][5] == "4", "all of them are over 5 %"


def test_a_share_stays_within_one(bench: Any) -> None:
    low, high = bench._limits({"sharding_share": 0.95, "update_seconds": 5e-3}, bench.np.zeros(2))
    assert list(0.95 * bench.np.exp(high[:1])) == pytest.approx([1.0]) and high[1] == -low[1] == bench.ROUND_LIMIT


def test_an_unknown_figure_is_refused(bench: Any) -> None:
    with pytest.raises(SystemExit, match="no figures speed; use some of product_flops_per_second"):
        bench.fit_figures([], MACHINE, ["speed"])


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--rounds", "0"], "--rounds 0 would fit nothing"), (["--out", "nowhere/a.md"], "there is no folder nowhere")],
)
def test_flags_are_read_before_anything_is_fitted(
    bench: Any, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fit_figures.py", *words])
    with pytest.raises(SystemExit):
        bench.main()
    out, error = capsys.readouterr()
    assert not out and message in error


def test_rows_of_other_gpus_follow_the_machine(bench: Any) -> None:
    import predictions  # pyright: ignore[reportMissingImports]

    present = bench.machine_figures(MACHINE)
    assert bench.machine_figures(bench.replace_figures(MACHINE, present)) == pytest.approx(present)
    assert predictions.scale_machine(MACHINE, "H100") == Machine.known("H100")
    changed = bench.replace_figures(MACHINE, {"layer_pass_seconds": 100e-12, "inside": 90e9, "inside_gather": 2.0})
    scaled = predictions.scale_machine(changed, "H100")
    assert scaled.layer_pass_seconds == pytest.approx(100e-12 * 4.8 / 3.35)
    speeds = (scaled.inside.point.bytes_per_second, scaled.inside.gather.bytes_per_second)
    assert speeds == pytest.approx((180e9, 360e9))

"""The curves of a run in its report: the loss, and what is measured of each step beside it."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from longspan.report.charts.chart import Chart, Series
from longspan.report.charts.series import smooth
from longspan.report.evaluation_sections import SAME, relative_spread
from longspan.report.evaluations.rows import EvalRow
from longspan.report.run_folder import MTP_LOSS, RunFolder


def finite(values: np.ndarray) -> np.ndarray:
    """The values of steps that have one."""
    return values[np.isfinite(values)]


def loss_chart(run: RunFolder, width: int) -> Chart:
    """The loss of every step, averaged where there are many, and of the held-out documents at each degree."""
    loss, vocab = run.train["loss"], run.vocab_size()
    window = max(5, len(loss) // 30) if len(loss) >= 20 else 1
    series = [Series("training", run.step, loss, 0, "faint" if window > 1 else "line")]
    if window > 1:
        series.append(Series(f"training, averaged over {window} steps", run.step, smooth(loss, window), 0))
    for place, (name, rows) in enumerate(_evaluations_by_degree(run)):
        x, y = np.array([r.step for r in rows]), np.array([r.loss for r in rows])
        series.append(Series(name, x, y, 1 + place, "marks"))
    uniform = ((math.log(vocab), f"ln V = {math.log(vocab):.3f}, a uniform guess"),) if vocab else ()
    title, label = "Training and evaluation", "nats per predicted token"
    return Chart(title, tuple(series), label, width=width, height=360, references=uniform, y_format="loss")


def _evaluations_by_degree(run: RunFolder) -> Iterator[tuple[str, list[EvalRow]]]:
    """Evaluations of the held-out documents by degree, with names: the degree that was evaluated most often first, and
    those whose every loss equals its loss at that step named with it, for their marks would lie on its own.
    """
    by_degree = dict[str, list[EvalRow]]()
    for row in run.held_out:
        by_degree.setdefault(row.degree, []).append(row)
    if not by_degree:
        return
    main = max(by_degree, key=lambda degree: len(by_degree[degree]))
    losses = {row.step: row.loss for row in by_degree[main]}
    equal = {
        degree: rows
        for degree, rows in by_degree.items()
        if degree != main and all(relative_spread([losses.get(r.step, np.inf), r.loss]) <= SAME for r in rows)
    }
    steps = sorted({row.step for rows in equal.values() for row in rows})
    beside = (
        f"; equal at {', '.join(equal)} after step {', '.join(f'{step:,}' for step in steps[-2:])}" if equal else ""
    )
    yield f"evaluation, {_degree_name(main)}{beside}", by_degree[main]
    for degree, rows in by_degree.items():
        if degree != main and degree not in equal:
            yield f"evaluation, {_degree_name(degree)}", rows


def _degree_name(degree: str) -> str:
    return "dynamic plans" if degree == "dynamic" else f"cp {degree}"


def small_charts(run: RunFolder) -> Iterator[Chart]:
    """A chart for each figure that the run measured of its steps."""
    curves = partial(_curves, run)
    norm = finite(run.train["grad_norm"])
    spiky = len(norm) > 0 and float(norm.min()) > 0 and float(norm.max()) > 30 * float(np.median(norm))
    yield Chart("Speed", curves("tokens_per_second", 0), "tokens per second", zero=True)
    yield from _shares(run)
    yield Chart("Rows used", curves("efficiency", 2), "of as many as the fullest slot has", y_format="percent")
    yield Chart("Time of a step", curves("seconds", 3), "seconds", zero=True)
    yield Chart("Gradient norm", curves("grad_norm", 1), "before clipping", log=spiky)
    yield Chart("Learning rate", curves("lr", 4, window=1), "per step", zero=True)
    yield Chart("Peak memory", curves("memory_bytes", 5, window=1), "bytes of a process", y_format="bytes", zero=True)
    for title, name in (("Router balance loss", "router_balance_loss"), ("Router z-loss", "router_z_loss")):
        if len(finite(run.train[name])):
            yield Chart(title, curves(name, 1), "before its weight")
    if depths := [name for name in run.train if name.startswith(MTP_LOSS)]:
        lines = _averages(run, [(f"depth {name.removeprefix(MTP_LOSS)}", name) for name in depths])
        yield Chart("Multi-token prediction", lines, "nats per predicted token", y_format="loss")


def _shares(run: RunFolder) -> Iterator[Chart]:
    """How near steps come to the devices' peak and to the bound of their plans, and the encoder's part of them."""
    if len(finite(run.train["mfu"])):
        share = _curves(run, "mfu", 3)
        yield Chart("Model FLOPs utilisation", share, "of the device's peak", y_format="percent", zero=True)
    elif len(finite(run.train["tflops"])):
        yield Chart("Model FLOPs", _curves(run, "tflops", 3), "TFLOP/s of a device", zero=True)
    if len(finite(run.train["bound_share"])):
        share = _curves(run, "bound_share", 2)
        yield Chart("Share of the plan's bound", share, "lower bound / seconds", y_format="percent", zero=True)
    if len(finite(run.train["encoder_share"])):
        both = _averages(run, [("measured", "encoder_share"), ("predicted", "predicted_encoder_share")])
        yield Chart("Encoder", both, "share of the step", y_format="percent", zero=True)


def _curves(run: RunFolder, name: str, color: int, window: int | None = None) -> tuple[Series, ...]:
    """A column's values, and their averages over as many steps (None: by the number of steps; 1: none)."""
    values, window = run.train[name], window or _window(run)
    if window == 1:
        return (Series("each step", run.step, values, color),)
    averaged = Series(f"averaged over {window} steps", run.step, smooth(values, window), color)
    return Series("each step", run.step, values, color, "faint"), averaged


def _averages(run: RunFolder, columns: Sequence[tuple[str, str]]) -> tuple[Series, ...]:
    """The averages of several columns, each a name to show and that of the column, in one chart."""
    window = _window(run)
    return tuple(Series(shown, run.step, smooth(run.train[name], window), i) for i, (shown, name) in enumerate(columns))


def _window(run: RunFolder) -> int:
    return max(5, len(run.step) // 60) if len(run.step) >= 100 else 1

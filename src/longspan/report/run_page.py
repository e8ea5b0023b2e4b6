"""The sections of a run's report: key figures, curves, the table of degrees, the configuration."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from longspan.errors import counted
from longspan.report.charts.chart import chart_figure
from longspan.report.evaluation_sections import SAME, both_widths, evaluation_sections, relative_spread
from longspan.report.evaluations.passkey_section import passkey_section
from longspan.report.evaluations.rows import last_rows
from longspan.report.evaluations.samples_section import samples_section
from longspan.report.markup import section, tag, text
from longspan.report.run_charts import finite, loss_chart, small_charts
from longspan.report.run_folder import RunFolder
from longspan.report.value_text import bytes_text, number_text, seconds_text
from longspan.run.facts import RunFacts

_DEGREES = ("tp", "pp", "vpp", "ep", "dp_replicate")  # of [parallel]; 1 is not worth a word
LAST = 10  # steps in "final loss"
CARDS = 4  # in a row, at most
HALF = 460  # width of a chart of which two fill a row


def run_sections(run: RunFolder) -> Iterator[str]:
    """The parts of the page in order; the configuration comes last."""
    yield _header(run)
    if run.facts is not None:
        yield section("The run", _facts(run.facts))
    yield _figures(run)
    yield section("Loss", *both_widths(partial(loss_chart, run)))
    yield from evaluation_sections(run)
    if run.passkey:
        yield passkey_section(run.passkey)
    if run.samples:
        yield samples_section(run.samples)
    yield section("Steps", tag("div", *_small_figures(run), class_="grid-3"))
    if run.notes:
        yield section("Left out", tag("ul", *(tag("li", text(note)) for note in run.notes), class_="notes"))
    if run.config_text:
        yield tag("section", tag("details", tag("summary", "Configuration"), tag("pre", text(run.config_text))))


def _header(run: RunFolder) -> str:
    steps = f"steps {int(run.step[0]):,} to {int(run.step[-1]):,}" if len(run.step) else "no training step"
    title = tag("p", "longspan", class_="brand") + tag("h1", text(run.name))
    parts = [*_described(run), steps + _ending(run)]
    versions = run.summary.get("versions")
    made = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    lines = (tag("p", text(" · ".join(line)), class_="sub") for line in (parts, made) if line)
    story = "; ".join(_story(run))
    return tag(
        "header", title, *lines, tag("p", text(f"{story[:1].upper()}{story[1:]}."), class_="story") if story else ""
    )


def _story(run: RunFolder) -> Iterator[str]:
    """What came of the run: how the loss went, and whether degrees agree."""
    loss, seconds = finite(run.train["loss"]), finite(run.train["seconds"])
    if len(loss) > 1:
        took = f" in {seconds_text(float(seconds.sum()))} of steps" if len(seconds) else ""
        yield f"loss {loss[0]:.3g} → {loss[-LAST:].mean():.3g}{took}"
    rows = list(run.final or last_rows(run.held_out))
    if not rows:
        return
    degrees, spread = ", ".join(row.degree for row in rows), relative_spread([row.loss for row in rows])
    same = "the same" if spread <= SAME else "different"
    many = f", {same} at degrees {degrees} to {spread:.1e}" if len(rows) > 1 else ""
    yield f"{rows[0].loss:.4g} on documents that it never saw{many}"


def _ending(run: RunFolder) -> str:
    if not run.summary:
        return ", has not finished or was interrupted"
    stopped = run.summary.get("stopped")
    return (
        f", stopped by {stopped} after step {run.summary.get('step')} of {run.summary.get('steps')}" if stopped else ""
    )


def _described(run: RunFolder) -> Iterator[str]:
    """What was trained on what, from the configuration."""

    def value(section: str, key: str) -> object:
        values = run.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    model, data = value("model", "path") or value("model", "preset"), value("data", "path")
    if model:
        yield f"{model} on {data}" if data else str(model)
    if degrees := [f"{key} {degree}" for key in _DEGREES if (degree := value("parallel", key)) not in (None, 1)]:
        yield " x ".join(degrees) + (", sequence-parallel" if value("parallel", "sequence_parallel") else "")
    planner, degree = value("context", "planner"), value("context", "context_parallel_size")
    if planner:
        free = ", free" if value("context", "mode") == "free" else ""
        yield f"{planner} plans{free}" + (f", cp {degree}" if degree and planner != "dynamic" else "")
    if value("context", "eval_planner") == "dynamic":
        yield "evaluated by dynamic plans"
    elif value("context", "eval_context_parallel_size"):
        yield f"evaluated at cp {value('context', 'eval_context_parallel_size')}"


def _facts(facts: RunFacts) -> str:
    lines = (tag("dt", text(name)) + tag("dd", text(words)) for name, words in facts.lines() if name != "report")
    return tag("dl", *lines, class_="said")


def _figures(run: RunFolder) -> str:
    cards = [
        tag("div", tag("dt", text(name)), tag("dd", text(value)), tag("p", text(detail)), class_="card")
        for name, value, detail in _key_figures(run)
    ]
    rows = -(-len(cards) // CARDS)
    columns = f"--columns: {-(-len(cards) // rows) if rows else 1}"
    return tag("section", tag("dl", *cards, class_="cards", style=columns), aria_label="key figures")


def _small_figures(run: RunFolder) -> Iterator[str]:
    """Three charts a row, and at the end two, so that none stands alone."""
    charts = list(small_charts(run))
    halves = {0: 0, 1: 4, 2: 2}[len(charts) % 3] if len(charts) > 1 else 0
    for chart in charts[: len(charts) - halves]:
        yield chart_figure(chart)
    for chart in charts[len(charts) - halves :]:
        yield chart_figure(replace(chart, width=HALF), css_class="half")


def _key_figures(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    loss, vocab = finite(run.train["loss"]), run.vocab_size()
    if len(loss):
        mean = float(loss[-LAST:].mean())
        share = f"{100 * mean / math.log(vocab):.0f}% of ln V = {math.log(vocab):.3f}" if vocab else ""
        detail = "; ".join(filter(None, [f"mean of the last {min(LAST, len(loss))}", share]))
        yield "training loss", f"{mean:.4f}", detail
    rows = list(run.final or last_rows(run.held_out))
    if rows:
        degrees = ", ".join(row.degree for row in rows)
        spread = relative_spread([r.loss for r in rows])
        same = f"; degrees {degrees} differ by {spread:.1e}" if len(rows) > 1 else f"; degree {degrees}"
        yield "evaluation loss", f"{rows[0].loss:.4f}", f"after step {rows[0].step:,}{same}"
    speed = finite(run.train["tokens_per_second"])
    if len(speed):
        yield "tokens per second", number_text(float(np.median(speed))), "median of all steps"
    yield from _shares(run)
    seconds = finite(run.train["seconds"])
    if len(seconds):
        tokens, targets = (finite(run.train[name]).sum() for name in ("tokens", "targets"))
        detail = f"{counted(len(seconds), 'step')}, {number_text(tokens)} tokens, {number_text(targets)} targets"
        yield "time in steps", seconds_text(float(seconds.sum())), detail
    memory = finite(run.train["memory_bytes"])
    if len(memory) and memory.max() > 0:
        yield "peak memory", bytes_text(float(memory.max())), "of a process"


def _shares(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    """How near the steps come to the devices' peak, and to the bound of their plans, where these are known."""
    mfu, tflops, bound = (finite(run.train[name]) for name in ("mfu", "tflops", "bound_share"))
    median = float(np.median(tflops)) if len(tflops) else 0.0
    if len(mfu):
        yield "model FLOPs utilisation", f"{100 * np.median(mfu):.1f}%", f"median; {median:.0f} TFLOP/s a device"
    elif len(tflops):
        yield "model FLOPs", _flops_text(median), "of a device, median of all steps"
    if len(bound) and run.facts is not None:
        detail = f"median: the plan's lower bound, priced for {run.facts.priced_for}, over the time"
        yield "share of the plan's bound", f"{100 * np.median(bound):.0f}%", detail
    measured, predicted = (finite(run.train[f"{name}encoder_share"]) for name in ("", "predicted_"))
    if len(measured) and len(predicted):
        balances = (finite(run.train[f"{name}encoder_balance"]) for name in ("", "predicted_"))
        balance, as_planned = (float(np.median(values)) if len(values) else 1.0 for values in balances)
        detail = f"of the step, median; {100 * np.median(predicted):.0f}% predicted; busiest rank {balance:.2f} of the "
        yield "encoder", f"{100 * np.median(measured):.0f}%", detail + f"mean, {as_planned:.2f} predicted"


def _flops_text(tflops: float) -> str:
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"

"""The sections of a run's report: header, key figures, curves of its steps, the configuration.

Evaluations are in `evaluation_sections.py`, plans in `plan_section.py`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from longspan.config.plan_section import ONE_DEGREE
from longspan.errors import plural
from longspan.evaluation.result import SAME, largest_difference
from longspan.plain_text import bytes_text, number_text, seconds_text
from longspan.report.chart import COLORS, Chart, Series, chart_figure, smooth
from longspan.report.evaluation_sections import (
    chart_at_both_widths,
    evaluation_sections,
    evaluations_by_degree,
    samples_section,
)
from longspan.report.markup import section, tag, text
from longspan.report.memory_section import memory_section, peak_of_plan, peak_of_steps
from longspan.report.run_folder import MTP_LOSS, RunFolder, last_evaluations


def finite(values: np.ndarray) -> np.ndarray:
    """Return the values that are finite: steps without a value have NaN."""
    return values[np.isfinite(values)]


def loss_chart(run: RunFolder, width: int) -> Chart:
    """Return the loss of every step, averaged where there are many, and of the held-out documents at each degree.

    A line marks the loss of a uniform guess, the logarithm of the vocabulary's size V.
    """
    loss, vocab = run.train["loss"], run.vocab_size()
    window = max(5, len(loss) // 30) if len(loss) >= 20 else 1
    series = [Series("training", run.step, loss, 0, "faint" if window > 1 else "line")]
    if window > 1:
        series.append(Series(f"training, averaged over {window} steps", run.step, smooth(loss, window), 0))
    for index, (name, rows) in enumerate(evaluations_by_degree(run)):
        x, y = np.array([r.step for r in rows]), np.array([r.loss for r in rows])
        series.append(Series(name, x, y, (1 + index) % COLORS, "marks"))
    uniform = ((math.log(vocab), f"ln V = {math.log(vocab):.3f}, a uniform guess"),) if vocab else ()
    title, label = "Training and evaluation", "nats per predicted token"
    chart = Chart(title, tuple(series), label, width=width, height=360, references=uniform, y_format="loss")
    return replace(chart, events=resume_events(run))


def resume_events(run: RunFolder) -> tuple[tuple[float, str], ...]:
    """Return where the run was resumed: for each time the last step before it, and words.

    The words have the number of ranks if that changed. A session that began at step 0 resumed nothing.
    """
    sessions = run.facts.sessions if run.facts is not None else ()
    pairs = zip(((0, 0), *sessions), sessions, strict=False)  # (0, 0): no session before the first
    return tuple(
        (step, f"resumed on {plural(ranks, 'rank')}" if ranks != ranks_before else "resumed")
        for (_, ranks_before), (step, ranks) in pairs
        if step
    )


def small_charts(run: RunFolder) -> Iterator[Chart]:
    """Yield a chart for each figure that the run measured of its steps.

    Gradient norms get a logarithmic axis if one is over 30 times the median. Numbers after columns are colours.
    Window 1 means no averages: the learning rate is smooth, and a mean of memory would hide its peak.
    """
    curves = partial(column_curves, run)
    norm = finite(run.train["grad_norm"])
    spiky = len(norm) > 0 and float(norm.min()) > 0 and float(norm.max()) > 30 * float(np.median(norm))
    yield Chart("Speed", curves("tokens_per_second", 0), "tokens per second", zero=True)
    yield from _share_charts(run)
    yield Chart("Rows used", curves("efficiency", 2), "of as many as the fullest slot has", y_format="percent")
    yield Chart("Time of a step", curves("seconds", 3), "seconds", zero=True)
    yield Chart("Gradient norm", curves("grad_norm", 1), "before clipping", log=spiky)
    yield Chart("Learning rate", curves("lr", 4, window=1), "per step", zero=True)
    yield Chart("Peak memory", curves("memory_bytes", 5, window=1), "bytes of a process", y_format="bytes", zero=True)
    for title, name in (("Router balance loss", "router_balance_loss"), ("Router z-loss", "router_z_loss")):
        if len(finite(run.train[name])):
            yield Chart(title, curves(name, 1), "before its weight")
    if depths := [name for name in run.train if name.startswith(MTP_LOSS)]:
        lines = _mean_curves(run, [(f"depth {name.removeprefix(MTP_LOSS)}", name) for name in depths])
        yield Chart("Multi-token prediction", lines, "nats per predicted token", y_format="loss")


def _share_charts(run: RunFolder) -> Iterator[Chart]:
    if len(finite(run.train["mfu"])):
        share = column_curves(run, "mfu", 3)
        yield Chart("Model FLOPs utilisation", share, "of the device's peak", y_format="percent", zero=True)
    elif len(finite(run.train["tflops"])):
        yield Chart("Model FLOPs", column_curves(run, "tflops", 3), "TFLOP/s of a device", zero=True)
    if len(finite(run.train["bound_share"])):
        share = column_curves(run, "bound_share", 2)
        yield Chart("Share of the plan's bound", share, "lower bound / seconds", y_format="percent", zero=True)
    if len(finite(run.train["encoder_share"])):
        encoder_series = _mean_curves(run, [("measured", "encoder_share"), ("predicted", "predicted_encoder_share")])
        yield Chart("Encoder", encoder_series, "share of the step", y_format="percent", zero=True)


def column_curves(run: RunFolder, name: str, color: int, window: int | None = None) -> tuple[Series, ...]:
    """Return the curve of a column and that of its averages over `window` steps (None: by their number; 1: none)."""
    values, window = run.train[name], window or _averaging_window(run)
    if window == 1:
        return (Series("each step", run.step, values, color),)
    averaged = Series(f"averaged over {window} steps", run.step, smooth(values, window), color)
    return Series("each step", run.step, values, color, "faint"), averaged


def _mean_curves(run: RunFolder, columns: Sequence[tuple[str, str]]) -> tuple[Series, ...]:
    window = _averaging_window(run)
    curves = ((label, smooth(run.train[name], window)) for label, name in columns)
    return tuple(Series(label, run.step, values, i % COLORS) for i, (label, values) in enumerate(curves))


def _averaging_window(run: RunFolder) -> int:
    """Return over how many steps curves are averaged: a sixtieth of all steps; 1, no average, for fewer than 100."""
    return max(5, len(run.step) // 60) if len(run.step) >= 100 else 1


_DEGREES = ("tp", "pp", "vpp", "ep", "dp_replicate")  # of [parallel]; 1 is not worth a word
LAST = 10  # steps, whose mean is the training loss that is shown
CARDS = 4  # in a row, at most
HALF = 460  # width of a chart, two in a row


def run_sections(run: RunFolder) -> Iterator[str]:
    """Yield the parts of the page in order; the configuration comes last."""
    yield _run_header(run)
    if run.facts is not None:
        facts = (item for item in run.facts.lines() if item[0] != "report")
        lines = (tag("dt", text(name)) + tag("dd", text(words)) for name, words in facts)
        yield section("The run", tag("dl", *lines, class_="said"))
    yield _figure_cards(run)
    yield section("Loss", *chart_at_both_widths(partial(loss_chart, run)))
    yield from evaluation_sections(run)
    if run.samples:
        yield samples_section(run.samples)
    yield memory_section(run)
    yield _profile_part(run)
    yield section("Steps", tag("div", *_small_figures(run), class_="grid-3"))
    if run.notes:
        yield section("Left out", tag("ul", *(tag("li", text(note)) for note in run.notes), class_="notes"))
    if run.config_text:
        yield tag("section", tag("details", tag("summary", "Configuration"), tag("pre", text(run.config_text))))


def _profile_part(run: RunFolder) -> str:
    if not (run.path / "profiles").is_dir():
        return ""
    from longspan.report.profile_section import profile_section

    return profile_section(run.path)


def _run_header(run: RunFolder) -> str:
    steps = f"steps {int(run.step[0]):,} to {int(run.step[-1]):,}" if len(run.step) else "no training step"
    title = tag("p", "longspan", class_="brand") + tag("h1", text(run.name))
    parts = [*configuration_parts(run), steps + _ending_text(run)]
    versions = run.summary.get("versions")
    version_texts = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    session = [words for words in (run.facts.date, run.facts.command) if words] if run.facts is not None else []
    lines = (tag("p", text(" · ".join(line)), class_="sub") for line in (session, parts, version_texts) if line)
    story = "; ".join(_outcome_words(run))
    sentence = tag("p", text(f"{story[:1].upper()}{story[1:]}."), class_="story") if story else ""
    return tag("header", title, sentence, *lines)


def _outcome_words(run: RunFolder) -> Iterator[str]:
    loss, seconds = finite(run.train["loss"]), finite(run.train["seconds"])
    if len(loss) > 1:
        duration = f" in {seconds_text(float(seconds.sum()))} of steps" if len(seconds) else ""
        yield f"loss {loss[0]:.3g} → {loss[-LAST:].mean():.3g}{duration}"
    rows = list(run.final or last_evaluations(run.held_out))
    if not rows:
        return
    degrees, spread = ", ".join(row.degree for row in rows), largest_difference([row.loss for row in rows])
    agreement = "the same" if spread <= SAME else "different"
    degree_text = f", {agreement} at degrees {degrees} to {spread:.1e}" if len(rows) > 1 else ""
    yield f"{rows[0].loss:.4g} on documents that it never saw{degree_text}"


def _ending_text(run: RunFolder) -> str:
    if not run.summary:
        return ", has not finished or was interrupted"
    stopped = run.summary.get("stopped")
    steps = f"step {run.summary.get('step')} of {run.summary.get('steps')}"
    return f", stopped by {stopped} after {steps}" if stopped else ""


def configuration_parts(run: RunFolder) -> Iterator[str]:
    """Yield what was trained on what, by which plans, and how it was evaluated, from the configuration."""

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
        yield f"{planner} plans{free}" + (f", cp {degree}" if degree and planner in ONE_DEGREE else "")
    if value("context", "eval_planner") == "dynamic":
        yield "evaluated by dynamic plans"
    elif value("context", "eval_context_parallel_size"):
        yield f"evaluated at cp {value('context', 'eval_context_parallel_size')}"


def _figure_cards(run: RunFolder) -> str:
    cards = [
        tag("div", tag("dt", text(name)), tag("dd", text(value)), tag("p", text(detail)), class_="card")
        for name, value, detail in _key_figures(run)
    ]
    rows = -(-len(cards) // CARDS)
    columns = f"--columns: {-(-len(cards) // rows) if rows else 1}"
    return tag("section", tag("dl", *cards, class_="cards", style=columns), aria_label="key figures")


def _small_figures(run: RunFolder) -> Iterator[str]:
    """Charts stand three a row; two left over make a row of two, one makes two rows of two with the three before."""
    events = tuple((step, "") for step, _ in resume_events(run))
    charts = [replace(chart, events=events) for chart in small_charts(run)]
    halves = {0: 0, 1: 4, 2: 2}[len(charts) % 3] if len(charts) > 1 else 0
    for chart in charts[: len(charts) - halves]:
        yield chart_figure(chart)
    for chart in charts[len(charts) - halves :]:
        yield chart_figure(replace(chart, width=HALF), css_class="half")


def _key_figures(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    loss, vocab = finite(run.train["loss"]), run.vocab_size()  # ln V is the loss of a uniform guess among V tokens
    if len(loss):
        mean = float(loss[-LAST:].mean())
        share = f"{100 * mean / math.log(vocab):.0f}% of ln V = {math.log(vocab):.3f}" if vocab else ""
        detail = "; ".join(filter(None, [f"mean of the last {min(LAST, len(loss))}", share]))
        yield "training loss", f"{mean:.4f}", detail
    rows = list(run.final or last_evaluations(run.held_out))
    if rows:
        degrees = ", ".join(row.degree for row in rows)
        spread = largest_difference([r.loss for r in rows])
        degree_text = f"; degrees {degrees} differ by {spread:.1e}" if len(rows) > 1 else f"; degree {degrees}"
        yield "evaluation loss", f"{rows[0].loss:.4f}", f"after step {rows[0].step:,}{degree_text}"
    speed = finite(run.train["tokens_per_second"])
    if len(speed):
        yield "tokens per second", number_text(float(np.median(speed))), "median of all steps"
    yield from _share_figures(run)
    seconds = finite(run.train["seconds"])
    if len(seconds):
        tokens, targets = (finite(run.train[name]).sum() for name in ("tokens", "targets"))
        detail = f"{plural(len(seconds), 'step')}, {number_text(tokens)} tokens, {number_text(targets)} targets"
        yield "time in steps", seconds_text(float(seconds.sum())), detail
    if peak := peak_of_steps(run):
        planned = peak_of_plan(run)
        yield "peak memory", bytes_text(peak), "of a process" + (f"; planned {bytes_text(planned)}" if planned else "")


def _share_figures(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    """Each is a name, a value and words about it; those that are not known are left out."""
    mfu, tflops, bound = (finite(run.train[name]) for name in ("mfu", "tflops", "bound_share"))
    median = float(np.median(tflops)) if len(tflops) else 0.0
    if len(mfu):
        yield "model FLOPs utilisation", f"{100 * np.median(mfu):.1f}%", f"median; {median:.0f} TFLOP/s a device"
    elif len(tflops):
        yield (
            "model FLOPs",
            f"{median:.3g} TFLOP/s" if median >= 1 else f"{1e3 * median:.3g} GFLOP/s",
            "of a device, median of all steps",
        )
    if len(bound) and run.facts is not None:
        detail = f"median: the plan's lower bound, priced for {run.facts.priced_for}, over the time"
        yield "share of the plan's bound", f"{100 * np.median(bound):.0f}%", detail
    seconds, predicted_seconds = run.train["seconds"], run.train["predicted_seconds"]
    if len(ratios := finite(seconds[predicted_seconds > 0] / predicted_seconds[predicted_seconds > 0])):
        yield "measured / predicted", f"{np.median(ratios):.2f}", "seconds, median of all steps"
    measured, predicted = (finite(run.train[f"{name}encoder_share"]) for name in ("", "predicted_"))
    if len(measured) and len(predicted):
        balances = (finite(run.train[f"{name}encoder_balance"]) for name in ("", "predicted_"))
        balance, as_planned = (float(np.median(values)) if len(values) else 1.0 for values in balances)
        detail = f"of the step, median; {100 * np.median(predicted):.0f}% predicted; busiest rank {balance:.2f} of the "
        yield "encoder", f"{100 * np.median(measured):.0f}%", detail + f"mean, {as_planned:.2f} predicted"

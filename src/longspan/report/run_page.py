"""The sections of a run's report: key figures, curves, the table of degrees, the configuration."""

import math
from collections.abc import Iterator
from html import escape

import numpy as np

from longspan.report.chart import Chart, Series, chart_figure
from longspan.report.run_folder import EvalRow, RunFolder
from longspan.report.series import smooth, write_bytes, write_number, write_seconds

LAST = 10  # steps in "final loss"
SAME = 1e-6  # relative difference up to which two degrees are called equal


def run_sections(run: RunFolder) -> Iterator[str]:
    """The parts of the page in order; the configuration comes last."""
    yield _header(run)
    yield _figures(run)
    yield f"<section><h2>Loss</h2>{chart_figure(_loss_chart(run), css_class='wide')}</section>"
    table = degrees_table(run.final or _last_evaluations(run))
    if table:
        yield table
    yield f'<section><h2>Steps</h2><div class="grid-3">{"".join(chart_figure(c) for c in _small_charts(run))}</div></section>'
    if run.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
        yield f'<section><h2>Left out</h2><ul class="notes">{items}</ul></section>'
    if run.config_text:
        yield f"<section><details><summary>Configuration</summary><pre>{escape(run.config_text)}</pre></details></section>"


def _header(run: RunFolder) -> str:
    first, last = (int(run.step[0]), int(run.step[-1])) if len(run.step) else (0, 0)
    steps = f"steps {first:,} to {last:,}" if len(run.step) else "no training step"
    unfinished = "" if run.summary else " · no summary: the run has not finished, or was interrupted"
    return f'<header><p class="brand">longspan</p><h1>{escape(run.name)}</h1><p class="sub">{steps}{unfinished}</p></header>'


def _figures(run: RunFolder) -> str:
    cards = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><p>{escape(detail)}</p></div>'
        for name, value, detail in _key_figures(run)
    )
    return f'<section aria-label="key figures"><dl class="cards">{cards}</dl></section>'


def _key_figures(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    loss, vocab = _finite(run.train["loss"]), run.vocab_size()
    if len(loss):
        mean = float(loss[-LAST:].mean())
        share = f"{100 * mean / math.log(vocab):.0f}% of ln V = {math.log(vocab):.3f}" if vocab else ""
        yield (
            "training loss",
            f"{mean:.4f}",
            "; ".join(filter(None, [f"mean of the last {min(LAST, len(loss))}", share])),
        )
    rows = run.final or _last_evaluations(run)
    if rows:
        degrees = ", ".join(str(r.cp) for r in rows)
        spread = _spread(rows)
        same = f"; degrees {degrees} differ by {spread:.1e}" if len(rows) > 1 else f"; degree {degrees}"
        yield "evaluation loss", f"{rows[0].loss:.4f}", f"after step {rows[0].step:,}{same}"
    speed = _finite(run.train["tokens_per_second"])
    if len(speed):
        yield "tokens per second", write_number(float(np.median(speed))), "median of all steps"
    packing = _finite(run.train["efficiency"])
    if len(packing):
        yield "packing efficiency", f"{100 * packing.mean():.1f}%", f"mean; lowest step {100 * packing.min():.1f}%"
    seconds = _finite(run.train["seconds"])
    if len(seconds):
        tokens = _finite(run.train["tokens"]).sum()
        yield (
            "time in steps",
            write_seconds(float(seconds.sum())),
            f"{len(seconds):,} steps, {write_number(tokens)} tokens",
        )
    yield from _setting(run)


def _setting(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    memory = _finite(run.train["memory_bytes"])
    if len(memory) and memory.max() > 0:
        yield "peak memory", write_bytes(float(memory.max())), "of a process"
    world = run.summary.get("world")
    if world is not None:
        yield "world", f"{world}", "processes"
    versions = run.summary.get("versions")
    if isinstance(versions, dict) and versions:
        name = "longspan" if "longspan" in versions else next(iter(versions))
        others = " · ".join(f"{k} {v}" for k, v in versions.items() if k != name)
        yield str(name), str(versions[name]), others


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _last_evaluations(run: RunFolder) -> tuple[EvalRow, ...]:
    last = max((r.step for r in run.evaluations), default=0)
    return tuple(r for r in run.evaluations if r.step == last)


def _spread(rows: tuple[EvalRow, ...]) -> float:
    losses = [r.loss for r in rows]
    return (max(losses) - min(losses)) / abs(losses[0]) if losses[0] else 0.0


def _loss_chart(run: RunFolder) -> Chart:
    loss, vocab = run.train["loss"], run.vocab_size()
    window = max(1, len(loss) // 30)
    series = [Series("training", run.step, loss, 0, "faint")]
    if window > 1:
        series.append(Series(f"training, averaged over {window} steps", run.step, smooth(loss, window), 0))
    else:
        series = [Series("training", run.step, loss, 0)]
    for place, cp in enumerate(sorted({r.cp for r in run.evaluations})):
        rows = [r for r in run.evaluations if r.cp == cp]
        x, y = np.array([r.step for r in rows]), np.array([r.loss for r in rows])
        series.append(Series(f"evaluation, cp {cp}", x, y, 1 + place, "marks"))
    references = ((math.log(vocab), f"ln V = {math.log(vocab):.3f}, a uniform guess"),) if vocab else ()
    label = "nats per predicted token"
    return Chart(
        "Training and evaluation", tuple(series), label, width=1120, height=360, references=references, y_format="loss"
    )


def _small_charts(run: RunFolder) -> Iterator[Chart]:
    window = max(1, len(run.step) // 60)

    def curves(name: str, color: int, window: int = window) -> tuple[Series, ...]:
        values = run.train[name]
        if window == 1:
            return (Series("each step", run.step, values, color),)
        averaged = Series(f"averaged over {window} steps", run.step, smooth(values, window), color)
        return Series("each step", run.step, values, color, "faint"), averaged

    norm = _finite(run.train["grad_norm"])
    spiky = len(norm) > 0 and float(norm.min()) > 0 and float(norm.max()) > 30 * float(np.median(norm))
    yield Chart("Speed", curves("tokens_per_second", 0), "tokens per second", zero=True)
    yield Chart("Packing efficiency", curves("efficiency", 2), "tokens / rows laid out", y_format="percent")
    yield Chart("Time of a step", curves("seconds", 3), "seconds", zero=True)
    yield Chart("Gradient norm", curves("grad_norm", 1), "before clipping", log=spiky)
    yield Chart("Learning rate", curves("lr", 4, window=1), "per step", zero=True)
    yield Chart("Peak memory", curves("memory_bytes", 5, window=1), "bytes of a process", y_format="bytes", zero=True)


def degrees_table(rows: tuple[EvalRow, ...]) -> str:
    """The same weights on the same documents at several degrees, beside each other."""
    if not rows:
        return ""
    base = rows[0]
    body = "".join(_degree_row(row, base) for row in rows)
    return (
        f'<section><h2>Evaluation at each degree</h2><p class="note">The weights after step {base.step:,}, the same documents. '
        f"Equal means within {SAME:g} of the first row, relative.</p>"
        '<div class="scroll"><table><thead><tr><th>cp</th><th>loss</th><th>perplexity</th><th>predicted tokens</th><th>relative difference</th><th></th>'
        f"</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _degree_row(row: EvalRow, base: EvalRow) -> str:
    relative = (row.loss - base.loss) / abs(base.loss) if base.loss else 0.0
    good = abs(relative) <= SAME and row.tokens == base.tokens
    verdict = "reference" if row is base else "✓ equal" if good else "✗ differs"
    css = "" if row is base else "good" if good else "bad"
    difference = "" if row is base else f"{relative:+.1e}"
    perplexity = f"{math.exp(row.loss):,.3f}" if row.loss < 50 else "over 1e21"
    return (
        f"<tr><td>{row.cp}</td><td>{row.loss:.9f}</td><td>{perplexity}</td><td>{row.tokens:,}</td><td>{difference}</td>"
        f'<td class="{css}">{verdict}</td></tr>'
    )

"""The parts of the page of a run that trains, each as markup that a browser puts in place of the one before."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from longspan.errors import plural
from longspan.plain_text import bytes_text, number_text, seconds_text
from longspan.plan.plan_rows import group_counts
from longspan.report.chart import Chart, chart_figure
from longspan.report.evaluation_sections import HELD_OUT, chart_at_both_widths
from longspan.report.follow.live_run import LiveRun
from longspan.report.markup import page, room_text, section, tag, text
from longspan.report.plan_section import plan_section
from longspan.report.report_pages import step_seconds
from longspan.report.run_page import LAST, column_curves, configuration_parts, finite, loss_chart, resume_events

SHOWN_EVALUATIONS = 12  # at most, the newest first
RECENT = 20  # steps that an estimate is made of
STALLED = 10  # times the median step, and half a minute at least, after which a step counts as late
_WORDS = {"waiting": "waits", "running": "trains", "done": "done", "stopped": "stopped", "broken": "ended"}


def live_page(live: LiveRun, *, nonce: str) -> str:
    """Return the whole page, whose script asks for the parts that change."""
    parts = (tag("div", markup, data_part=name) for name, markup in live_parts(live).items())
    style, script = room_text("follow.css"), room_text("follow.js")
    return page(live_title(live), [*parts], style=style, script=script, nonce=nonce)


def live_title(live: LiveRun) -> str:
    """Return what the browser shows on its tab: how far the run is, its state and its name."""
    progress = f"{live.step:,}/{live.steps:,}" if live.steps else f"{live.step:,}"
    return f"{progress} {_WORDS[live.state]} · {live.run.name} · longspan"


def live_parts(live: LiveRun) -> dict[str, str]:
    """Return the parts by name, in their order; a part whose records cannot be shown says so."""
    parts: dict[str, Callable[[LiveRun], str]] = {
        "status": _status_header,
        "figures": _figure_cards,
        "loss": _loss_section,
        "plan": _plan_part,
        "speed": _speed_section,
        "evaluations": _evaluation_section,
        "saves": _save_section,
        "ranks": _rank_section,
        "notes": _note_section,
    }
    with np.errstate(all="ignore"):
        return {name: _markup_or_note(make, live, name) for name, make in parts.items()}


def _markup_or_note(make: Callable[[LiveRun], str], live: LiveRun, name: str) -> str:
    try:
        return make(live)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
        words = f"{name} cannot be shown: records hold values that no run writes ({type(error).__name__}: {error})"
        return tag("p", text(words[:500]), class_="note")


def _status_header(live: LiveRun) -> str:
    title = tag("p", "longspan", class_="brand") + tag("h1", text(live.run.name))
    state = tag("span", text(_WORDS[live.state]), class_=f"state {live.state}", role="status")
    story = tag("p", state, text(" · ".join(_progress_words(live))), class_="story")
    bar = tag("progress", max=live.steps, value=live.step, aria_label="steps") if live.steps else ""
    parts = [*configuration_parts(live.run)]
    return tag("header", title, story, bar, tag("p", text(" · ".join(parts)), class_="sub") if parts else "")


def _progress_words(live: LiveRun) -> Iterator[str]:
    """Yield how far the run is, how long the steps that are left will take, and whether it seems to have stalled."""
    if live.state != "running":
        yield live.state_sentence()
        if live.state == "waiting":
            yield "this page shows one that begins"
        elif live.state in ("done", "stopped"):
            yield "its report is report.html in its folder"
        return
    total = f" of {live.steps:,}" if live.steps else ""
    yield f"step {live.step:,}{total}" if live.step else f"sets up, before step 1{total}"
    seconds = finite(live.run.train["seconds"])
    usual_seconds = float(np.median(seconds[-RECENT:])) if len(seconds) else 0.0
    if usual_seconds > 0:
        if live.steps > live.step:
            yield f"about {seconds_text(usual_seconds * (live.steps - live.step))} of steps left"
        if live.idle > max(30.0, STALLED * usual_seconds):
            yield f"no step for {seconds_text(live.idle)}, where one takes {seconds_text(usual_seconds)}"


def _figure_cards(live: LiveRun) -> str:
    cards = [
        tag("div", tag("dt", text(name)), tag("dd", text(value)), tag("p", text(detail)), class_="card")
        for name, value, detail in _figures(live)
    ]
    return tag("section", tag("dl", *cards, class_="cards live"), aria_label="key figures") if cards else ""


def _figures(live: LiveRun) -> Iterator[tuple[str, str, str]]:
    train = live.run.train
    loss, speed, seconds, peak = map(
        finite, (train[n] for n in ("loss", "tokens_per_second", "seconds", "memory_bytes"))
    )
    if len(loss):
        yield "training loss", f"{loss[-LAST:].mean():.4f}", f"mean of the last {plural(min(LAST, len(loss)), 'step')}"
    if rows := live.run.held_out:
        yield "evaluation loss", f"{rows[-1].loss:.4f}", f"after step {rows[-1].step:,}; degree {rows[-1].degree}"
    if len(speed):
        yield "tokens per second", number_text(float(np.median(speed[-RECENT:]))), _median_words(speed)
    if len(seconds):
        time = seconds_text(float(np.median(seconds[-RECENT:])))
        yield "time of a step", time, f"{_median_words(seconds)}; {seconds_text(float(seconds.sum()))} in all"
    if len(peak):
        yield "peak memory", bytes_text(float(peak.max())), "of a process"


def _median_words(values: np.ndarray) -> str:
    return f"median of the last {plural(min(RECENT, len(values)), 'step')}"


def _loss_section(live: LiveRun) -> str:
    if not len(live.run.step) and not live.run.evaluations:
        return ""
    return section("Loss", *chart_at_both_widths(partial(loss_chart, live.run)))


def _speed_section(live: LiveRun) -> str:
    if not len(live.run.step):
        return ""
    charts = _column_chart(live, "Speed", "tokens_per_second", 0), _column_chart(live, "Time of a step", "seconds", 3)
    figures = (chart_figure(chart, css_class="pair") for chart in charts)
    return section("Steps", tag("div", *figures, class_="grid-2"))


def _column_chart(live: LiveRun, title: str, name: str, color: int) -> Chart:
    events = tuple((step, "") for step, _ in resume_events(live.run))
    unit = "tokens per second" if name == "tokens_per_second" else "seconds"
    curves = column_curves(live.run, name, color)
    return Chart(title, curves, unit, width=480, height=200, events=events, zero=True)


def _plan_part(live: LiveRun) -> str:
    if live.plan is None:
        return ""
    step, plan = live.plan
    name = f"step {step:,}"
    rows = [
        [str(row["degree"]), str(row["cp_comm_type"]) or "–", f"{row['count']:,}", f"{row['tokens']:,}"]
        for row in group_counts(plan)
    ]
    table = _table(("degree", "type", "groups", "tokens"), rows)
    seconds = {name: step_seconds(live.run, name)}
    picture = plan_section([(name, plan)], measured_seconds=seconds, title=f"Plan of {name}, the newest")
    return section("Degrees and types", table) + picture


def _evaluation_section(live: LiveRun) -> str:
    rows = live.run.evaluations[::-1]
    if not rows:
        return ""
    cells = [
        [
            f"{r.step:,}",
            r.name or HELD_OUT,
            r.degree,
            f"{r.loss:.6f}",
            r.perplexity,
            f"{r.documents:,}",
            f"{r.tokens:,}",
        ]
        for r in rows[:SHOWN_EVALUATIONS]
    ]
    note = f"The newest {SHOWN_EVALUATIONS} of {len(rows):,}." if len(rows) > SHOWN_EVALUATIONS else "The newest first."
    names = ("step", "set", "degree", "loss", "perplexity", "documents", "tokens")
    table = _table(names, cells, minor=("documents",))
    return section("Evaluations", tag("p", text(note), class_="note"), table)


def _save_section(live: LiveRun) -> str:
    lines = list[str]()
    if live.checkpoints:
        lines.append(f"in the folder: {', '.join(f'step {step:,}' for step in live.checkpoints)}")
    if live.unfinished:
        doing = "being written" if live.state == "running" else "not complete"
        lines.append(f"{doing}: {', '.join(f'step {step:,}' for step in live.unfinished)}")
    rows = [
        [f"{save.step:,}", bytes_text(save.bytes), seconds_text(save.seconds), seconds_text(save.shown_seconds)]
        for save in reversed(live.saves)
    ]
    table = _table(("known at step", "size", "written in", "training paused"), rows) if rows else ""
    if not lines and not rows:
        return ""
    return section("Saves", *(tag("p", text(line), class_="note") for line in lines), table)


def _rank_section(live: LiveRun) -> str:
    """Return which process is at work, the ranks, and the facts that the run gave before its first step.

    Of these facts "steps" is left out, as the head of the page has it, and "report", which is not written yet.
    """
    facts = live.run.facts
    items = [("at work", live.holder)] if live.holder else []
    if facts is not None:
        items += [("ranks", _rank_words(facts.home, facts.ranks))]
        items += [(name, words) for name, words in facts.lines() if name not in ("report", "steps")]
    if not items:
        return ""
    lines = (tag("dt", text(name)) + tag("dd", text(words)) for name, words in items)
    return section("Ranks and run", tag("dl", *lines, class_="said"))


def _rank_words(home: dict[str, int], ranks: int) -> str:
    of_slot = home.get("tp", 1) * home.get("pp", 1)
    return f"{ranks:,} in {plural(home['slots'], 'slot')}" + (f" of {of_slot}" if of_slot > 1 else "")


def _note_section(live: LiveRun) -> str:
    if not live.notes:
        return ""
    return section("Notes", tag("ul", *(tag("li", text(note[:500])) for note in live.notes), class_="notes"))


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], minor: Sequence[str] = ()) -> str:
    classes = ["minor" if name in minor else None for name in names]
    head = tag("tr", *(tag("th", text(name), class_=css_class) for name, css_class in zip(names, classes, strict=True)))
    body = (
        tag("tr", *(tag("td", text(cell), class_=css_class) for cell, css_class in zip(row, classes, strict=True)))
        for row in rows
    )
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="plain"), class_="scroll")

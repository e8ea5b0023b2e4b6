"""The page of a run's folder. Sections about evaluations are in `evaluation_page.py`."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longspan.checkpoint.files import complete_checkpoints, is_unfinished, step_of
from longspan.errors import ConfigError, RunFolderError, plural
from longspan.evaluation.result import SAME, largest_difference
from longspan.files import name_file_in_errors, os_error_text, write_atomically
from longspan.plain_text import LogLine, bytes_text, number_text, seconds_text
from longspan.plan.memory.memory_plan import policies_text
from longspan.report.evaluation_page import (
    NATS,
    completion_sections,
    degree_curves,
    degree_sections,
    loss_unit,
    sections_of_sets,
)
from longspan.report.gantt import PICTURE_NOTE, plan_part
from longspan.report.page import (
    Part,
    chart,
    curve,
    finite_values,
    moving_average,
    page,
    page_head,
    section,
    table,
)
from longspan.report.run_folder import MTP_LOSS, RunFolder

# What building a page raises for records that hold values which no run writes.
BAD_RECORD = (
    OSError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
    MemoryError,
)
LAST = 10  # steps, whose mean is the training loss
RECENT = 20  # steps, whose medians are the figures of a live run
SHOWN = 8  # profiled steps and saves, the last ones
MOST_TEXT = 1 << 16  # characters of a profile's table
MEMORY_KINDS = {
    "weights": "parameters of this rank",
    "packed": "its frozen parameters in four or eight bits",
    "gradients": "their gradients",
    "states": "the optimizer's states",
    "gathered": "whole parameters of layers, and their gradients before they are summed",
    "kept": "what layers keep between forward and backward",
    "work": "what the layer that runs holds besides",
    "logits": "a chunk of logits, and what the loss makes of it",
    "communicators": "buffers of NCCL, and the CUDA context",
}
_PERCENT = {"format": "percent"}
_ZERO = {"zero": True}
_STEP_CHARTS: tuple[tuple[str, str, str, int, dict[str, Any]], ...] = (  # title, column, unit, colour, options
    ("Speed", "tokens_per_second", "tokens per second", 0, _ZERO),
    ("Model FLOPs utilisation", "mfu", "of the device's peak", 3, _PERCENT | _ZERO),
    ("Model FLOPs", "tflops", "TFLOP/s of a device", 3, _ZERO),
    ("Share of the plan's bound", "bound_share", "lower bound / seconds", 2, _PERCENT | _ZERO),
    ("Rows used", "efficiency", "of as many as the fullest slot has", 2, _PERCENT),
    ("Time of a step", "seconds", "seconds", 3, _ZERO),
    ("Reward margin", "rewards/margins", "chosen - rejected", 2, {}),
    ("Reward accuracy", "rewards/accuracies", "of pairs", 2, _PERCENT),
    ("Divergence", "kl", "from the teacher, or the reference", 2, {}),
    ("Entropy", "entropy", "nats, of the model's distributions", 4, {}),
    ("Gradient norm", "grad_norm", "before clipping", 1, {}),
    ("Learning rate", "lr", "factor of an update", 4, _ZERO),
    ("Peak memory", "memory_bytes", "bytes of a process", 5, _ZERO | {"format": "bytes"}),
    ("Router balance loss", "router_balance_loss", "before its weight", 1, {}),
    ("Router z-loss", "router_z_loss", "before its weight", 1, {}),
)


def write_report(run_dir: str | Path, log: LogLine = lambda _: None) -> Path:
    """Write `report.html` into a run's folder and return its path. What could not be read is logged.

    Raises ConfigError for a folder that is no run, RunFolderError for what the disk refuses.

    >>> write_report("runs/first")  # doctest: +SKIP
    """
    run = RunFolder.read(run_dir)
    try:
        with np.errstate(all="ignore"):
            value = {"head": run_head(run), "sections": [part for make in RUN_SECTIONS for part in make(run)]}
    except BAD_RECORD as error:
        raise ConfigError(
            f"the records in {run.path} make no report ({type(error).__name__}: {error}): metrics.jsonl, run.json, "
            "summary.json or plans/ hold values that no run writes; restore them"
        ) from error
    for note in run.notes:
        log(note)
    path = run.path / "report.html"
    try:
        with name_file_in_errors(path):
            text = page(f"{run.name} · longspan", value)
            write_atomically(path, text.encode(errors="replace").decode())  # names of files need not be UTF-8
    except OSError as error:
        raise RunFolderError(os_error_text(error)) from error
    return path


def run_head(run: RunFolder) -> Part:
    """Return the head of a run's page: a sentence on its losses, its date and command, its steps and versions."""
    loss = finite_values(run.train["loss"])
    seconds = finite_values(run.train["seconds"])
    words = list[str]()
    if len(loss) > 1:
        duration = f" in {seconds_text(float(seconds.sum()))} of steps" if len(seconds) else ""
        words.append(f"loss {loss[0]:.3g} → {loss[-LAST:].mean():.3g}{duration}")
    if rows := [*run.newest_by_degree]:
        spread = largest_difference([row.loss for row in rows])
        degrees = ", ".join(row.degree for row in rows)
        agreement = f", {'the same' if spread <= SAME else 'different'} at degrees {degrees} to {spread:.1e}"
        words.append(f"{rows[0].loss:.4g} on held-out documents{agreement if len(rows) > 1 else ''}")
    story = f"{'; '.join(words)}." if words else ""
    steps = f"steps {int(run.step[0]):,} to {int(run.step[-1]):,}" if len(run.step) else "no training step"
    if not run.summary:
        steps += ", has not finished or was interrupted"
    elif stopped := run.summary.get("stopped"):
        steps += f", stopped by {stopped} after step {run.summary.get('step')} of {run.summary.get('steps')}"
    elif reason := run.summary.get("end_reason"):
        steps += f", ended after step {run.summary.get('step')} of {run.summary.get('steps')}: {reason}"
    if best := run.best_text():
        steps += f"; {best}"
    versions = run.summary.get("versions")
    version_texts = (
        [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    )
    lines = (
        session_text(run),
        " · ".join(filter(None, (model_and_data_text(run), steps))),
        " · ".join(version_texts),
    )
    return page_head(run.name, *lines, story=story[:1].upper() + story[1:])


def session_text(run: RunFolder) -> str:
    """Return the date and command of a run's last session; "" without run.json."""
    if run.facts:
        return " · ".join(map(str, filter(None, (run.facts.date, run.facts.command))))
    return ""


def model_and_data_text(run: RunFolder) -> str:
    """Say which model was trained on what, by config.toml; "" where it names no model."""
    model = run.configured_value("model", "path") or run.configured_value("model", "preset")
    data = run.configured_value("data", "path")
    return f"{model} on {data}" if model and data else str(model or "")


def fact_sections(run: RunFolder) -> Iterator[Part]:
    """Yield the facts of run.json."""
    if run.facts is not None:
        yield section("The run", {"facts": [line for line in run.facts.lines if line[0] != "report"]})


def card_sections(run: RunFolder) -> Iterator[Part]:
    """Yield the key figures of a run as cards; of a run that trains those of its last steps."""
    if cards := [*_key_figures(run, RECENT if run.live else 0)]:
        yield section("", {"cards": cards}, key="figures")


def _key_figures(run: RunFolder, recent: int) -> Iterator[tuple[str, str, str]]:
    """Medians are of `recent` steps (0: all)."""
    train = run.train
    facts = run.facts
    of_steps = f"median of the last {recent} steps" if recent else "median"
    medians = {name: float(np.median([*finite_values(train[name])[-recent:]] or [math.nan])) for name in train}
    recorded = {name for name, median in medians.items() if not math.isnan(median)}
    loss = finite_values(train["loss"])
    seconds = finite_values(train["seconds"])
    vocab = run.vocab_size()
    if len(loss):
        mean = float(loss[-LAST:].mean())
        share = f"; {100 * mean / math.log(vocab):.0f}% of ln V = {math.log(vocab):.3f}" if vocab else ""
        yield "training loss", f"{mean:.4f}", f"mean of the last {min(LAST, len(loss))}{share}"
    if rows := [*run.newest_by_degree]:
        degrees = ", ".join(row.degree for row in rows)
        spread = largest_difference([row.loss for row in rows])
        words = f"degrees {degrees} differ by {spread:.1e}" if len(rows) > 1 else f"degree {degrees}"
        yield "evaluation loss", f"{rows[0].loss:.4f}", f"after step {rows[0].step:,}; {words}"
    if "tokens_per_second" in recorded:
        yield "tokens per second", number_text(medians["tokens_per_second"]), of_steps
    tflops = medians["tflops"]
    if "mfu" in recorded:
        yield (
            "model FLOPs utilisation",
            f"{100 * medians['mfu']:.1f}%",
            f"{of_steps}; {tflops:.0f} TFLOP/s a device",
        )
    elif "tflops" in recorded:
        words = f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"
        yield "model FLOPs", words, f"of a device, {of_steps}"
    if "bound_share" in recorded and facts is not None:
        words = f"{of_steps}: the plan's lower bound, priced for {facts.priced_for}, over the time"
        yield "share of the plan's bound", f"{100 * medians['bound_share']:.0f}%", words
    predicted = train["predicted_seconds"] > 0
    if len(ratios := finite_values(train["seconds"][predicted] / train["predicted_seconds"][predicted])[-recent:]):
        yield "measured / predicted", f"{np.median(ratios):.2f}", f"seconds, {of_steps}"
    if "encoder_share" in recorded:
        words = f"of the step, {of_steps}"
        words += f"; predicted {100 * medians['predicted_encoder_share']:.0f}%" if len(ratios) else ""
        yield "encoder", f"{100 * medians['encoder_share']:.0f}%", words
    if len(seconds):
        tokens, targets = (number_text(finite_values(train[name]).sum()) for name in ("tokens", "targets"))
        words = f"{of_steps}; {seconds_text(float(seconds.sum()))} in all, {plural(len(seconds), 'step')}"
        yield "time of a step", seconds_text(medians["seconds"]), f"{words}, {tokens} tokens, {targets} targets"
    if "spared_tokens" in recorded:
        spared = finite_values(train["spared_tokens"]).sum()
        share = spared / (spared + finite_values(train["tokens"]).sum())
        yield (
            "tokens in shared prefixes",
            number_text(spared),
            f"not computed again: {100 * share:.0f}% of all documents'",
        )
    peak, planned = measured_and_planned_peaks(run)
    if peak:
        yield (
            "peak memory",
            bytes_text(peak),
            "of a process" + (f"; planned {bytes_text(planned)}" if planned else ""),
        )


def loss_sections(run: RunFolder) -> Iterator[Part]:
    """Yield the loss of every step, averaged where there are many, and of the held-out documents at each degree. A line
    marks the loss of a uniform guess, the logarithm of the vocabulary's size V.
    """
    if not len(run.step) and not run.evaluations:
        return
    loss = run.train["loss"]
    vocab = run.vocab_size()
    window = max(5, len(loss) // 30) if len(loss) >= 20 else 1
    curves = _curves_of_steps(run, "loss", window, ("training", "training, averaged"))
    uniform = [(math.log(vocab), f"ln V = {math.log(vocab):.3f}, a uniform guess")] if vocab else []
    options = {"format": "loss", "tall": True, "references": uniform, "events": resume_events(run)}
    yield section(
        "Loss",
        {"charts": [chart("Training and evaluation", loss_unit(run), *curves, *degree_curves(run), **options)]},
    )


def _curves_of_steps(
    run: RunFolder, column: str, window: int, names: tuple[str, str], color: int = 0
) -> list[Part]:
    values = run.train[column]
    if window == 1:
        return [curve(names[0], run.step, values, color)]
    averages = moving_average(values, window)
    return [
        curve(names[0], run.step, values, color, "faint"),
        curve(f"{names[1]} over {window} steps", run.step, averages, color),
    ]


def resume_events(run: RunFolder) -> list[tuple[int, str]]:
    """List where the run was resumed: the last step before each time, and words, with the ranks if they changed."""
    sessions = run.facts.sessions if run.facts is not None else ()
    events = list[tuple[int, str]]()
    ranks_before = 0
    for step, ranks in sessions:
        if step:
            events.append((step, "resumed" if ranks == ranks_before else f"resumed on {plural(ranks, 'rank')}"))
        ranks_before = ranks
    return events


def step_sections(run: RunFolder) -> Iterator[Part]:
    """Yield a chart for each figure that the run measured of its steps. Gradient norms get a logarithmic axis if one is
    over 30 times the median. Averages are over a sixtieth of all steps, from 100 steps on; the learning rate is smooth,
    and an average of memory would hide its peak.
    """
    if not len(run.step):
        return
    window = max(5, len(run.step) // 60) if len(run.step) >= 100 else 1
    charts = list[Part]()
    shown = {name for name, values in run.train.items() if len(finite_values(values))}
    shown -= {"tflops"} if "mfu" in shown else set()  # mfu is tflops over the GPU's peak
    norm = finite_values(run.train["grad_norm"])
    events = [(step, "") for step, _ in resume_events(run)]
    spiky = len(norm) > 0 and float(norm.min()) > 0 and float(norm.max()) > 30 * float(np.median(norm))
    for title, name, unit, color, options in _STEP_CHARTS:
        if name not in shown:
            continue
        chart_window = 1 if name in ("lr", "memory_bytes") else window
        curves = _curves_of_steps(run, name, chart_window, ("each step", "averaged"), color)
        charts.append(chart(title, unit, *curves, events=events, log=spiky and name == "grad_norm", **options))
    shares = {"encoder_share": "measured"} if "encoder_share" in shown else {}
    shares |= {"predicted_encoder_share": "predicted"} if shares and "predicted_seconds" in shown else {}
    depths = {name: f"depth {name.removeprefix(MTP_LOSS)}" for name in run.train if name.startswith(MTP_LOSS)}
    joint_charts = (
        ("Encoder", "share of the step", shares, "percent"),
        ("Multi-token prediction", NATS, depths, "loss"),
    )
    for title, unit, labels, number_format in joint_charts:  # several figures in each, as averages alone
        averages = ((label, moving_average(run.train[name], window)) for name, label in labels.items())
        curves = [curve(label, run.step, y, color) for color, (label, y) in enumerate(averages)]
        charts += [chart(title, unit, *curves, events=events, format=number_format)] if curves else []
    yield section("Steps", {"charts": charts})


def save_sections(run: RunFolder) -> Iterator[Part]:
    """Yield the checkpoints in the run's folder, complete and not, and the size and seconds of the last saves."""
    folder = run.path / "checkpoints"
    parts = list[Part]()
    if folder.is_dir() and not run.configured_value("checkpoint", "dir"):
        unfinished = {step_of(path) for path in folder.iterdir() if is_unfinished(path)} - {-1}  # -1: no step
        complete = sorted(map(step_of, complete_checkpoints(folder)))
        for words, steps in (("in the folder", complete), ("being written, or not complete", sorted(unfinished))):
            if steps:
                parts.append({"note": f"{words}: {', '.join(f'step {step:,}' for step in steps)}"})
    columns = (run.train[name].tolist() for name in ("save_bytes", "save_seconds", "save_shown_seconds"))
    rows = [row for row in zip(run.step.tolist(), *columns, strict=True) if all(value >= 0 for value in row)]
    cells = [[f"{step:,}", bytes_text(size), *map(seconds_text, seconds)] for step, size, *seconds in rows[-SHOWN:]]
    if cells:
        parts.append(table(("known at step", "size", "written in", "training paused"), cells[::-1]))
    if parts:
        yield section("Saves", *parts)


def memory_sections(run: RunFolder) -> Iterator[Part]:
    """Yield the plan of memory of run.json, bytes by what they are for, beside the measured peak. On GPUs the peak is
    what torch allocates, so that a total without communicators stands above it.
    """
    device = _planned_bytes(run, "device")
    host = _planned_bytes(run, "host")
    peak, planned = measured_and_planned_peaks(run)
    if not device.get("total") or run.facts is None:
        return
    policies = run.facts.memory.get("checkpoint_policies")
    words = f"{policies_text(policies if isinstance(policies, list) else ())}."
    if peak and not device.get("communicators"):  # a plan for CPUs has none
        words += " On CPUs the measured peak is the whole process's, with Python and its libraries."
    used = {
        kind: f"{kind}: {meaning}" for kind, meaning in MEMORY_KINDS.items() if device.get(kind) or host.get(kind)
    }
    rows = [
        [name, *(bytes_text(values[kind]) if values.get(kind) else "" for values in (device, host))]
        for kind, name in (*used.items(), ("total", "total"))
    ]
    if device.get("communicators"):
        rows.append(["total without communicators", bytes_text(planned), ""])
    if peak:
        rows.append(["measured peak", bytes_text(peak), ""])
    yield section("Memory", {"note": words}, table(("", "device", "host"), rows))


def measured_and_planned_peaks(run: RunFolder) -> tuple[float, float]:
    """Return the most bytes of any step, and the planned ones, without communicators; 0 for what is not known."""
    device = _planned_bytes(run, "device")
    planned = device.get("total", 0.0) - device.get("communicators", 0.0)
    return float(finite_values(run.train["memory_bytes"]).max(initial=0.0)), planned


def _planned_bytes(run: RunFolder, memory: str) -> dict[str, float]:
    values = run.facts.memory.get(memory) if run.facts is not None else None
    planned = values if isinstance(values, Mapping) else {}
    names = (*MEMORY_KINDS, "total")
    return {name: float(planned[name]) for name in names if isinstance(planned.get(name), int | float)}


def profile_sections(run: RunFolder) -> Iterator[Part]:
    """Yield the profiler's tables of the last steps that were profiled."""
    # run/profile.py has these names too, but imports torch.
    files = sorted(run.path.glob("profiles/step-*/table.txt"))[-SHOWN:]
    note = (
        "Milliseconds on the first rank, under the profiler, which makes a step longer. profiles/ has a trace of each "
        "rank, for Perfetto or chrome://tracing."
    )
    if files:
        texts = (file.read_text(encoding="utf-8", errors="replace")[:MOST_TEXT] for file in files)
        yield section("Profiled steps", {"note": note}, *({"text": words} for words in texts))


def plan_sections(run: RunFolder) -> Iterator[Part]:
    """Yield pictures of plans, with a selector between them: first that of the step whose time is the median; where
    none was measured, the middle one. A run records `predicted_seconds` if its plans are priced for its machine as it
    was measured; else none is shown.
    """
    if not run.plans:
        return
    names = [name for name, _ in run.plans]
    parts = list[Part]()
    predicts = len(finite_values(run.train["predicted_seconds"])) > 0
    first = names.index(run.median) if run.median in names else sum(name.startswith("step ") for name in names) // 2
    for name, plan in run.plans:
        is_measured = (
            run.value_of_planned_step(name, "predicted_seconds") is not None
            if name.startswith("step ")
            else predicts
        )
        title = f"{name}, the median" if name == run.median else name
        parts.append(plan_part(plan, title, run.value_of_planned_step(name, "seconds"), measured=is_measured))
    title = f"Plan of {names[0]}, the newest" if run.live else "Plan of a step"
    plans = {"plans": parts, "first": first}
    yield section(title, {"plans": plans}, {"note": PICTURE_NOTE}, key="plans")


def notes_sections(run: RunFolder) -> Iterator[Part]:
    """Yield what could not be read, and which folders have records of a failure."""
    folders = {"hang": "a collective failed or timed out", "memory": "memory was short"}
    here = (folder for folder in folders if (run.path / folder).is_dir())
    notes = [*run.notes, *(f"{folders[folder]}; what was recorded is in the folder {folder}" for folder in here)]
    if notes:
        yield section("Notes", *({"note": note[:500]} for note in notes))


def configuration_sections(run: RunFolder) -> Iterator[Part]:
    """Yield the text of config.toml, folded."""
    if run.config_text:
        text = {"title": "Configuration", "parts": [{"text": run.config_text}]}
        yield section("", {"details": text}, key="configuration")


RUN_SECTIONS: tuple[Callable[[RunFolder], Iterator[Part]], ...] = (
    card_sections,
    loss_sections,
    degree_sections,
    sections_of_sets,
    completion_sections,
    plan_sections,
    step_sections,
    save_sections,
    memory_sections,
    profile_sections,
    fact_sections,
    notes_sections,
    configuration_sections,
)

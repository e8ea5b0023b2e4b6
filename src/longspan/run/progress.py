"""The display of a running run, on its first rank: a progress bar on a terminal, else plain lines."""

import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn

from longspan.errors import plural
from longspan.launch.stop_signals import leave_closed_output

LINE_SECONDS = 30.0  # where there is no terminal, no longer without a line
# Columns of a terminal: of the bar, at most and at least, of the remaining time, and by how much figures may grow.
BAR, LEAST_BAR, REMAINING, SLACK = 24, 8, 7, 5

_COUNT = TextColumn("{task.fields[title]} {task.completed}/{task.total}")


class ProgressDisplay:
    """Shows steps and evaluations of a run; silent if `stream` is None.

    Where the stream is no terminal, a line is written for every `log_every` steps, and by a thread after 30 seconds
    without one.
    """

    def __init__(self, steps: int, stream: TextIO | None, *, log_every: int = 10) -> None:
        self._steps, self._stream, self._log_every = steps, stream, log_every
        self._plain = stream is not None and not stream.isatty()
        self._writing, self._ended = threading.Lock(), threading.Event()
        self._work, self._begun = "setting up", time.monotonic()  # what takes time now, and since when
        self._written = self._begun  # when the last line was
        self._thread: threading.Thread | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._shown_since: tuple[float, int] | None = None  # time and number of the first step that was shown
        self._figures_shown = 0  # of a step, that the terminal has room for
        self._evaluating: TaskID | None = None
        self._bar_only = False  # whether the bar is that of an evaluation, without one of steps

    def __enter__(self) -> "ProgressDisplay":
        if self._plain:
            self._thread = threading.Thread(target=self._log_while_quiet, name="longspan progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.end_bar()

    def set_steps(self, steps: int) -> None:
        self._steps = steps

    def log(self, text: str) -> None:
        """Show a line, above the bar if there is one."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self._stream is not None:
            with self._writing:
                try:
                    print(text, file=self._stream, flush=True)
                except BrokenPipeError:
                    leave_closed_output()  # the reader, such as `| tee`, is gone; the run goes on
                self._written = time.monotonic()

    def begin_step(self, step: int) -> None:
        self._begin_work(f"step {step}/{self._steps}")

    def show_step(self, row: Mapping[str, Any]) -> None:
        """Move the bar, or write a line for the first, the last and every `log_every` step, and where one is due."""
        self._begin_work(f"after {self._step_text(row)}")  # it may be saved or evaluated
        if self._stream is None:
            return
        if not self._plain:
            self._advance_bar(row)
        elif (
            row["step"] % self._log_every == 0
            or row["step"] in (1, self._steps)
            or time.monotonic() - self._written + row.get("seconds", 0.0) > LINE_SECONDS
        ):
            self.log(
                "  ".join(filter(None, (self._step_text(row), *_step_figures(row), self._remaining_time(row["step"]))))
            )

    def show_evaluation(self, row: Mapping[str, Any]) -> None:
        name, tokens, seconds = row.get("eval_name"), row["eval_tokens"], row["seconds"]
        subject = f"evaluation of {name}: loss" if name else "evaluation loss"
        self.log(
            f"{self._step_text(row)}  {subject} {row['eval_loss']:.6f} at cp {row['cp']} "
            f"({', '.join([plural(tokens, 'token'), *_metric_texts(row)])}, in {seconds:.1f} s)"
        )

    def show_eval_progress(self, name: str, done: int, count: int) -> None:
        """Show how many micro-batches of an evaluation are done, and how many it has."""
        title = f"evaluation of {name}" if name else "evaluation"
        if self._stream is None or self._plain:
            self._begin_work(f"{title}, {done:,} of {plural(count, 'micro-batch', 'es')} done", again=done > 0)
            return
        if self._evaluating is None:
            self._bar_only = self._progress is None
            if self._progress is None:
                self._progress = Progress(
                    _COUNT, BarColumn(BAR), TimeRemainingColumn(), console=Console(file=self._stream)
                )
                self._progress.start()
            self._evaluating = self._progress.add_task("", total=count, title=title)
        assert self._progress is not None
        self._progress.update(self._evaluating, completed=done)

    def end_evaluating(self) -> None:
        """Remove the bar of an evaluation."""
        if self._evaluating is not None and self._progress is not None:
            self._progress.remove_task(self._evaluating)
            self._evaluating = None
            if self._bar_only:
                self.end_bar()

    def end_bar(self) -> None:
        """Leave the progress bar as it stands; lines after it are plain."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _begin_work(self, work: str, *, again: bool = False) -> None:
        self._work, self._begun = work, self._begun if again else time.monotonic()

    def _log_while_quiet(self) -> None:
        while not self._ended.wait(min(1.0, LINE_SECONDS / 4)):
            now = time.monotonic()
            if now - self._written >= LINE_SECONDS:
                self.log(f"{self._work}: {now - self._begun:.0f} s so far")

    def _step_text(self, row: Mapping[str, Any]) -> str:
        return f"step {row['step']:>{len(str(self._steps))}}/{self._steps}"

    def _advance_bar(self, row: Mapping[str, Any]) -> None:
        if self._progress is None:
            console = Console(file=self._stream)
            self._figures_shown, columns = _fit_to_width(row, self._steps, console.width)
            bar = Progress(*columns, console=console, refresh_per_second=4)
            self._task = bar.add_task("", total=self._steps, completed=row["step"] - 1, title="step")
            bar.start()
            self._progress = bar
        figures = "  ".join(_step_figures(row)[: self._figures_shown])
        self._progress.update(self._task, completed=row["step"], description=figures)

    def _remaining_time(self, step: int) -> str:
        """The first step that is shown only starts the clock: its text is "", as is that of the last."""
        now = time.monotonic()
        if self._shown_since is None:
            self._shown_since = (now, step)
            return ""
        began, first_step = self._shown_since
        if step <= first_step or step >= self._steps:
            return ""
        seconds = round((now - began) / (step - first_step) * (self._steps - step))
        if seconds < 3600:
            return f"{seconds // 60}:{seconds % 60:02d} left"
        return f"{seconds // 3600}:{seconds // 60 % 60:02d} h left"


def _fit_to_width(row: Mapping[str, Any], steps: int, width: int) -> tuple[int, tuple[ProgressColumn, ...]]:
    """Figures get room first, then the remaining time, then a bar, which leaves SLACK columns to figures."""
    room, figures_shown = width - len(f"step {steps}/{steps}"), 0
    for figure in _step_figures(row):
        if room < len(figure) + 2:  # two spaces before each figure
            break
        room, figures_shown = room - len(figure) - 2, figures_shown + 1
    columns: list[ProgressColumn] = [_COUNT, TextColumn("{task.description}")]
    if room >= REMAINING + 1:  # one space before it
        room -= REMAINING + 1
        columns.append(TimeRemainingColumn())
    if room >= LEAST_BAR + SLACK:
        columns.insert(1, BarColumn(bar_width=min(BAR, room - SLACK)))
    return figures_shown, tuple(columns)


def _step_figures(row: Mapping[str, Any]) -> list[str]:
    """The most important first, in widths that hardly change from step to step."""
    norm, memory = row["grad_norm"], row["memory_bytes"]
    norm_text = f"{norm:.2f}" if 0.01 <= norm < 100 else _short_number(norm)
    figures = [f"loss {row['loss']:.4f}", f"lr {_short_number(row['lr'])}", f"norm {norm_text}"]
    figures.append(f"{row['tokens_per_second']:>5.0f} tok/s")
    if "mfu" in row:
        figures.append(f"MFU {100 * row['mfu']:.0f}%")
    if "bound_share" in row:
        figures.append(f"bound {100 * row['bound_share']:.0f}%")
    if "encoder_share" in row:
        figures.append(f"encoder {100 * row['encoder_share']:.0f}%")
    if depth_losses := [f"{loss:.4f}" for name, loss in row.items() if name.startswith("mtp_loss_")]:
        figures.append(f"mtp {'/'.join(depth_losses)}")
    return [*figures, f"{memory / 2**30:.1f} GiB" if memory >= 2**30 else f"{memory / 2**20:.0f} MiB"]


def _metric_texts(row: Mapping[str, Any]) -> list[str]:
    """Only figures are floats: counts are integers, and a metric that counted nothing is None."""
    texts = {
        "perplexity": "perplexity {:.4g}",
        "token_accuracy": "accuracy {:.1%}",
        "bits_per_byte": "{:.3f} bits/byte",
    }
    values = {
        key.removeprefix("eval_"): v for key, v in row.items() if key.startswith("eval_") and isinstance(v, float)
    }
    return [texts.get(name, f"{name} {{:.4g}}").format(value) for name, value in values.items() if name != "loss"]


def _short_number(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")

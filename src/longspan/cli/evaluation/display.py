"""What an evaluation shows while it goes: a progress bar on a terminal, else lines; nothing but on the first rank."""

import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from longspan.errors import counted
from longspan.run.progress import LINE_SECONDS

LINES = 10  # of one evaluation, where there is no terminal and it is short


class EvalDisplay:
    """Shows lines and how far evaluations are; silent where `stream` is None.

    >>> with EvalDisplay(sys.stderr) as display:
    ...     display.progress("wiki, cp 4", 16, 40)
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}  # of each evaluation, that were shown
        self._written = time.monotonic()  # when the last line was

    def __enter__(self) -> "EvalDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def log(self, text: str) -> None:
        """Show a line."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self._stream is not None:
            print(text, file=self._stream, flush=True)
            self._written = time.monotonic()

    def progress(self, title: str, done: int, count: int) -> None:
        """So many micro-batches of an evaluation are done, of so many."""
        if self._stream is None:
            return
        if self._stream.isatty():
            self._advance(title, done, count)
            return
        tenths = LINES * done // max(count, 1)
        if tenths > self._tenths.get(title, 0) or time.monotonic() - self._written >= LINE_SECONDS:
            self._tenths[title] = tenths
            self.log(f"{title}: {done:,} of {counted(count, 'micro-batch', 'es')}")

    def _advance(self, title: str, done: int, count: int) -> None:
        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=self._stream))
            self._bar.start()
        if title not in self._tasks:
            self._tasks[title] = self._bar.add_task(title, total=count)
        self._bar.update(self._tasks[title], completed=done)

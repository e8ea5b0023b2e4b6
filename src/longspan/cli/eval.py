"""`longspan eval`: saved weights evaluated on documents, at any degree, on any number of ranks."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from longspan.cli.evaluation.flags import make_request, parse_eval
from longspan.cli.evaluation.output import (
    check_writable,
    result_tables,
    write_documents,
    write_result_folder,
)
from longspan.cli.processes import (
    choose_processes,
    compile_attention_ahead,
    count_host_ranks,
    has_torchrun,
    is_reporting,
    print_note,
    run_on_ranks,
)
from longspan.corpus.files import find_root
from longspan.errors import plural
from longspan.evaluation.saved.request import EvalRequest, fit_evaluations
from longspan.evaluation.saved.results import SubjectResult, results_record
from longspan.files import as_json
from longspan.layout import Layout
from longspan.run.checks import check_config
from longspan.run.progress import LINE_SECONDS
from longspan.train.plans import home_of
from longspan.train.starts import Starts, begin_gpu_imports

LINES = 10  # of one evaluation where there is no terminal; a long one has a line each LINE_SECONDS too


class EvalDisplay:
    """Shows lines and how far evaluations are; silent where `stream` is None.

    >>> with EvalDisplay(sys.stderr) as display:
    ...     display.show_progress("wiki, cp 4", 16, 40)
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Begin without bars: on a terminal each evaluation adds its bar when it begins."""
        self._stream = stream
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}  # by title: how many tenths of an evaluation were shown
        self._written = time.monotonic()  # when the last line was written

    def __enter__(self) -> "EvalDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show_line(self, text: str) -> None:
        """Show a line."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self._stream is not None:
            print(text, file=self._stream, flush=True)
            self._written = time.monotonic()

    def show_progress(self, title: str, done: int, count: int) -> None:
        """Show how many of an evaluation's micro-batches are done: by its bar on a terminal, elsewhere by a line.

        A line is shown for each tenth (`LINES`), and where the last line is `LINE_SECONDS` old.
        """
        if self._stream is None:
            return
        if self._stream.isatty():
            if self._bar is None:
                columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()
                self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=self._stream))
                self._bar.start()
            if title not in self._tasks:
                self._tasks[title] = self._bar.add_task(title, total=count)
            self._bar.update(self._tasks[title], completed=done)
            return
        tenths = LINES * done // max(count, 1)
        if tenths > self._tenths.get(title, 0) or time.monotonic() - self._written >= LINE_SECONDS:
            self._tenths[title] = tenths
            self.show_line(f"{title}: {done:,} of {plural(count, 'micro-batch', 'es')}")


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    starts = Starts()
    flags = parse_eval(argv)
    processes = choose_processes(flags.world, flags.device)
    with processes.add_note_to_errors():
        request = make_request(argv, flags, processes.ranks)
        check_request(request, processes.ranks)
    if not has_torchrun():  # whose ranks run already: they find a missing path themselves
        for _, path in request.paths:
            find_root(path, key="--data")
    if is_reporting():
        check_writable(flags.documents, flags.out)
    print_note(processes.note, sys.stderr)
    starts.end_part("command")
    args = (request, processes.ranks, processes.backend, starts)
    config = request.subjects[0].config  # kernels that only a second subject calls are compiled when it is evaluated
    with compile_attention_ahead(config, processes, backward=False):
        results: tuple[SubjectResult, ...] = run_on_ranks(
            eval_rank, args, processes.ranks, compile_cache=config.run.compile_cache
        )
    if is_reporting():
        record = results_record(results, processes.ranks)
        if flags.documents:
            write_documents(results, Path(flags.documents))
        if flags.out:
            write_result_folder(results, record, Path(flags.out))
        print(as_json(record) if flags.json else result_tables(results, processes.ranks))
    return 0


def check_request(request: EvalRequest, ranks: int) -> Layout:
    """Check every value of a request for this number of ranks; returns the home of the evaluation."""
    home = home_of(request.subjects[0].config.parallel, ranks)
    for subject in request.subjects:
        check_config(fit_evaluations(subject.config, request.sets, home, request.flag_keys), ranks, training=False)
    return home


def eval_rank(rank: int, request: EvalRequest, ranks: int, backend: str, starts: Starts) -> tuple[SubjectResult, ...]:
    """Evaluate on one rank; `starts` has the seconds of the parts of the command's start so far.

    What imports torch is imported here, as a part of the start that is timed: the command itself needs no torch.
    """
    starts.end_part("processes")
    if backend == "nccl":
        begin_gpu_imports(count_host_ranks(ranks), compiled=False)  # whether to compile is decided later
    from longspan.comm import World
    from longspan.evaluation.saved.evaluate_saved import evaluate_saved

    starts.end_part("imports")
    home, seconds = check_request(request, ranks), request.subjects[0].config.run.timeout_seconds
    world = World(home, backend=backend, timeout=seconds)
    with world, EvalDisplay(sys.stderr if rank == 0 else None) as display:
        starts.end_part("groups")
        return evaluate_saved(request, world, display.show_line, display.show_progress, starts)

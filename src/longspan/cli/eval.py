"""`longspan eval`: saved weights evaluated on documents, at any degree, on any number of ranks."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

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
from longspan.evaluation.request import EvalRequest, SubjectResult, fit_evaluations, results_record, saved_weights
from longspan.files import as_json, read_json
from longspan.layout import Layout
from longspan.run.checks import check_config
from longspan.run.facts import RunFacts
from longspan.run.progress import LINE_SECONDS
from longspan.train.plans import home_of
from longspan.train.starts import Starts, begin_gpu_imports

LINES = 10  # of one evaluation; a long one has a line each LINE_SECONDS too


class EvalDisplay:
    """Shows lines and how far evaluations are; silent where `stream` is None.

    >>> EvalDisplay(sys.stderr).show_progress("wiki, cp 4", 16, 40)
    wiki, cp 4: 16 of 40 micro-batches
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._tenths: dict[str, int] = {}  # by title: how many tenths of an evaluation were shown
        self._written = time.monotonic()  # when the last line was written

    def show_line(self, text: str) -> None:
        """Show a line."""
        if self._stream is not None:
            print(text, file=self._stream, flush=True)
            self._written = time.monotonic()

    def show_progress(self, title: str, done: int, count: int) -> None:
        """Show how many of an evaluation's micro-batches are done, in a line for each tenth or each LINE_SECONDS."""
        tenths = LINES * done // max(count, 1)
        if tenths > self._tenths.get(title, 0) or time.monotonic() - self._written >= LINE_SECONDS:
            self._tenths[title] = tenths
            self.show_line(f"{title}: {done:,} of {plural(count, 'micro-batch', 'es')}")


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    starts = Starts()
    flags = parse_eval(argv)
    processes = choose_processes(flags.world, flags.device, on_cpus=_count_run_ranks(flags.target))
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
        results: tuple[SubjectResult, ...] = run_on_ranks(eval_rank, args, processes.ranks)
    if is_reporting():
        record = results_record(results, processes.ranks)
        if flags.documents:
            write_documents(results, Path(flags.documents))
        if flags.out:
            write_result_folder(results, record, Path(flags.out))
        print(as_json(record) if flags.json else result_tables(results, processes.ranks))
        if flags.out:
            print(f"Open {Path(flags.out) / 'report.html'}", file=sys.stderr if flags.json else sys.stdout)
    return 0


def _count_run_ranks(target: str) -> int:
    run_dir = saved_weights(target).run_dir
    values: Any = None
    with suppress(OSError, ValueError):
        values = read_json(run_dir / "run.json") if run_dir else None
    facts = RunFacts.from_json(values) if isinstance(values, dict) else None
    return facts.ranks if facts and facts.device == "CPU" else 1


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
    from longspan.evaluation.evaluate_saved import evaluate_saved

    starts.end_part("imports")
    home, seconds = check_request(request, ranks), request.subjects[0].config.run.timeout_seconds
    display = EvalDisplay(sys.stderr if rank == 0 else None)
    with World(home, backend=backend, timeout=seconds) as world:
        starts.end_part("groups")
        return evaluate_saved(request, world, display.show_line, display.show_progress, starts)

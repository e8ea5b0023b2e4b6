"""`longspan eval`: saved weights evaluated on documents, at any degree, on any number of ranks."""

import sys
from collections.abc import Sequence
from pathlib import Path

from longspan.cli.evaluation.files import check_writable, write_documents, write_folder, write_picture
from longspan.cli.evaluation.flags import EvalFlags, parse_eval, request_of
from longspan.cli.evaluation.tables import tables_of
from longspan.cli.processes import processes_of, reports_here, run_on_ranks, say, under_torchrun
from longspan.corpus.files import find_root
from longspan.evaluation.saved.comparison import results_record
from longspan.evaluation.saved.fit import checkable
from longspan.evaluation.saved.request import EvalRequest, SubjectResult
from longspan.files import as_json
from longspan.layout import Layout
from longspan.run.config_check import check_config
from longspan.train.plans import home_of


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    flags = parse_eval(argv)
    processes = processes_of(flags.world, flags.device)
    with processes.noted_in_errors():
        request = request_of(argv, flags, processes.ranks)
        check_request(request, processes.ranks)
    if not under_torchrun():
        for _, path in request.paths:
            find_root(path, key="--data")
    if reports_here():
        check_writable(flags.documents, flags.out, flags.plot)
    say(processes.note, sys.stderr)
    args, cache = (request, processes.ranks, processes.backend), request.subjects[0].config.run.compile_cache
    results: tuple[SubjectResult, ...] = run_on_ranks(eval_rank, args, processes.ranks, compile_cache=cache)
    if reports_here():
        _report(flags, results, processes.ranks)
    return 0


def _report(flags: EvalFlags, results: Sequence[SubjectResult], ranks: int) -> None:
    """Write the files that were asked for, and print the results."""
    record = results_record(results, ranks)
    if flags.documents:
        write_documents(results, Path(flags.documents))
    if flags.plot:
        write_picture(results, Path(flags.plot))
    if flags.out:
        write_folder(results, record, Path(flags.out))
    print(as_json(record) if flags.json else tables_of(results, ranks))


def check_request(request: EvalRequest, ranks: int) -> Layout:
    """The home of the evaluation, if every value is possible on so many ranks. Raises ConfigError or LayoutError."""
    home = home_of(request.subjects[0].config.parallel, ranks)
    for subject in request.subjects:
        check_config(checkable(subject.config, request.sets, home, request.given), ranks, training=False)
    return home


def eval_rank(rank: int, request: EvalRequest, ranks: int, backend: str) -> tuple[SubjectResult, ...]:
    """What one rank does."""
    from longspan.cli.evaluation.display import EvalDisplay
    from longspan.comm import World
    from longspan.evaluation.saved.evaluate_saved import evaluate_saved

    home, timeout = check_request(request, ranks), request.subjects[0].config.run.timeout_seconds
    with World(home, backend=backend, timeout=timeout) as world, EvalDisplay(sys.stderr if rank == 0 else None) as show:
        return evaluate_saved(request, world, show.log, show.progress)

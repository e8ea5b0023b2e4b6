"""Start N local ranks from one fork server, wait for their answers, and report which one failed and how.

Every rank is a fresh process with torchrun's variables set and no process group. The store that ranks share lives in
the parent (as under torchrun), so that survivors can still talk to it when a rank dies. Several machines are torchrun's
business, not this module's.

torch's launchers do less (2.13; eight ranks from a fork server with the same imports, on two busy cores):
`start_processes` of torch.distributed.elastic takes 1.6 s where `run_local` takes 0.8 s; torch.multiprocessing's takes
as long as `run_local`, but returns no results. Both end the other ranks as soon as one fails, before these can report
what they saw, do not let them learn how it died, and give its error as text. Neither shows where a rank is that does
not end, nor forwards signals.
"""

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspan.errors import CommError
from longspan.launch.fork_server import kill_fork_server
from longspan.launch.local_ranks import LocalRanks
from longspan.launch.stop_signals import Forwarding


def run_local(
    fn: Callable[..., Any],
    n: int,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    grace: float = 10.0,
    threads: int | None = None,
    ignored: Sequence[int] = (),
) -> list[Any]:
    """Run `fn(rank, *args)` on n fresh local processes and return their results by rank.

    >>> run_local(train_rank, 4, (config,), timeout=None)

    `fn` must be importable (a function at the top of a module or script). `timeout` bounds the wait for answers, in
    seconds from when all ranks have started (None: no limit); when one rank fails, the others have `grace` seconds to
    report and are then killed. `threads` is torch's number of threads in each rank (None: the CPUs shared out evenly).
    Output of the ranks goes where the caller's goes. A first SIGINT or SIGTERM is forwarded to the ranks, and the call
    waits until they end; a second one, more than a second later, kills them. SIGHUP, SIGUSR1 and SIGUSR2 are forwarded
    each time. If ranks end by such a signal, it has its usual effect here too. Signals that are `ignored` do nothing in
    a rank until `fn` handles them.

    The error of the rank that most likely made others fail is raised again here, with its type and its traceback as the
    cause. RankLostError names a rank that was killed or left without an answer, CommError the ranks that still ran when
    the time was up.
    """
    if n < 1:
        raise CommError(f"{n} ranks were asked for; give a count of at least 1")
    payload = pickle_call(fn, args)
    with tempfile.TemporaryDirectory(prefix="longspan-ranks-") as folder, _kill_server_on_interrupt():
        ranks = LocalRanks(n, Path(folder), threads or max(1, usable_cores() // n), payload, ignored=ignored)
        try:
            ranks.start()
            with Forwarding(ranks) as forwarding:
                ranks.collect_answers(timeout, grace)
        finally:
            ranks.end()
    if ranks.failure is not None:
        if ranks.was_ended_by(forwarding.sent):
            forwarding.repeat_signal()
        raise ranks.failure
    return [rank.answer.value() for rank in ranks.ranks if rank.answer is not None]


@contextmanager
def _kill_server_on_interrupt() -> Iterator[None]:
    """Kill the fork server if ranks are interrupted while they start: the server would go on importing for nobody."""
    try:
        yield
    except KeyboardInterrupt:
        kill_fork_server()
        raise


def pickle_call(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return a function and its arguments, pickled for a rank. Raises CommError for what cannot be pickled."""
    try:
        return pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CommError(
            f"{fn!r} and its arguments cannot be sent to other processes ({error}); give a function at the top of a "
            f"module and arguments that pickle"
        ) from error


def usable_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

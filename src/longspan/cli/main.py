"""`longspan VERB …`: finds the verb, and turns an error that a caller can act on into one line and exit code 2 or 3.

A verb is a module of this folder with `main(argv) -> int`, imported when it is called, so that `longspan plan` needs
no torch.
"""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module

from longspan import __version__
from longspan.errors import ConfigError, LongspanError, RankLostError
from longspan.launch.output import keep_prints_from_failing, refuse_full_output
from longspan.launch.stop_signals import Interrupted, raise_on_stop_signals
from longspan.plain_text import escape_controls

VERBS = {
    "train": "train a model on text; checkpoints, metrics and a report in the run's folder",
    "eval": "evaluate a checkpoint at any context-parallel degree",
    "generate": "complete prompts with the weights of a run or a folder",
    "export": "write a checkpoint as a Hugging Face folder",
    "plan": "what a step of these documents would do, or (--compare) what planners and degrees would cost",
    "bench": "calibrate this machine for predictions, or time a step of training",
    "report": "write the HTML report of a run or a plan, or show a run while it trains (--follow)",
    "examples": "list the examples that come with longspan, or copy them",
    "doctor": "check versions, kernels, process groups and exactness on this machine",
}
_RANK_VERBS = ("train", "eval", "generate")  # verbs that start ranks, unless they show help or a plan
_WITHOUT_RANKS = {"-h", "--help", "--help-all", "--help_all", "--dry_run", "--dry-run", "--show"}
# These verbs are not in this folder.
_MODULES = {"bench": "longspan.bench.benches"}
_VERB_LINES = "\n".join(f"  {verb:<10}{text}" for verb, text in VERBS.items())
USAGE = f"""longspan {__version__}

Train Hugging Face models on long documents: exact context parallelism, planned for each step.

usage: longspan VERB [flags]

{_VERB_LINES}

longspan VERB --help shows a verb's usual flags and examples, --help-all all of its flags.
--debug shows the traceback of an error."""
EXIT_ERROR = 2
# By this status a scheduler learns that starting the command again may help.
EXIT_RANK_LOST = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns its exit code, 2 for an error, 3 for a lost rank, or 128 + the number of a signal. If this is
    the command itself (`argv` is None), another process imports what ranks need in the meantime.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    is_command = argv is None
    if is_command:
        keep_prints_from_failing(None, ["stderr"])
    try:
        with (
            raise_on_stop_signals(),
            _import_ahead(words) if is_command else nullcontext(),
            refuse_full_output() if is_command else nullcontext(),
        ):
            verb = words[0] if words else "help"
            if verb in ("-h", "--help", "--help-all", "help"):
                print(USAGE)
                return 0
            if verb in ("-V", "--version"):
                print(f"longspan {__version__}")
                return 0
            if verb not in VERBS:
                from longspan.plain_text import nearest_hint

                raise ConfigError(f"longspan has no verb {verb!r}: {nearest_hint(verb, VERBS)}")
            return import_module(_MODULES.get(verb, f"longspan.cli.{verb}")).main(words[1:])
    except LongspanError as error:
        return _print_error(error, debug=debug)
    except KeyboardInterrupt as error:
        # A rank that is lost makes torchrun send a signal to the others: the loss is the news, not the signal.
        earlier_error = error.__context__
        while earlier_error is not None and not isinstance(earlier_error, RankLostError):
            earlier_error = earlier_error.__context__
        if earlier_error is not None:
            return _print_error(earlier_error, debug=debug)
        interrupted = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        if os.environ.get("RANK", "0") == "0":  # torchrun's other ranks got it too
            # A terminal may have closed.
            with suppress(OSError):
                print(f"interrupted by {interrupted}", file=sys.stderr, flush=True)
        return interrupted.status
    except BrokenPipeError:  # the reader of a pipe, `| head`, has left; Python would flush to it as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # A file or a folder may not be readable or writable.
        from longspan.files import os_error_text

        return _print_error(LongspanError(os_error_text(error)).with_traceback(error.__traceback__), debug=debug)


def _import_ahead(words: Sequence[str]) -> AbstractContextManager[None]:
    """Under torchrun (RANK is set) this process is a rank itself, and starts none."""
    starts_ranks = bool(words) and words[0] in _RANK_VERBS and not _WITHOUT_RANKS.intersection(words)
    if not starts_ranks or "RANK" in os.environ:
        return nullcontext()
    from longspan.cli.machine import allocator_environment
    from longspan.launch.fork_server import import_for_ranks

    return import_for_ranks(allocator_environment())


def _print_error(error: LongspanError, *, debug: bool) -> int:
    """Returns the exit code. Under torchrun the first line begins with the rank."""
    if debug:
        traceback.print_exception(error)
    rank = os.environ.get("RANK")
    label = "error:" if rank is None else f"error (rank {rank}):"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        label = f"\x1b[1;31m{label}\x1b[0m"
    notes = [note for note in getattr(error, "__notes__", ()) if str(error) not in note]
    lines = [f"{label} {escape_controls(str(error))}", *(f"  {escape_controls(note)}" for note in notes)]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return EXIT_RANK_LOST if isinstance(error, RankLostError) else EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())

"""`longspan bench step`: whole training steps of a model under several planners, beside what their plans predict."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from longspan.bench.record import write_record
from longspan.bench.step.flags import StepFlags
from longspan.bench.step.ranks import step_ranks
from longspan.bench.step.record import record_markdown, record_text
from longspan.bench.step.settings import make_settings
from longspan.cli.parse import parse_flags
from longspan.cli.processes import reports_here, run_on_ranks

CPU_RANKS = 2


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns the exit code."""
    flags = parse_flags(StepFlags, argv, "longspan bench step")
    ranks, backend = flags.processes(CPU_RANKS)
    settings = make_settings(flags, ranks, backend, ["longspan", "bench", "step", *argv])
    record = run_on_ranks(step_ranks, (settings,), ranks)
    if reports_here():
        if flags.out:
            write_record(record, Path(flags.out), record_markdown(record))
        print(json.dumps(record, indent=1) if flags.json else record_text(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

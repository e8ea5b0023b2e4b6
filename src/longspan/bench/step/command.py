"""`longspan bench step`: whole training steps of a model under several planners, beside what their plans predict."""

import sys
from collections.abc import Sequence

from longspan.bench.record import show_record
from longspan.bench.step.flags import parse_step
from longspan.bench.step.ranks import step_ranks
from longspan.bench.step.record import record_markdown, record_text
from longspan.bench.step.settings import make_settings
from longspan.cli.processes import run_on_ranks

CPU_RANKS = 2


def main(argv: Sequence[str]) -> int:
    """Run the bench. Returns the exit code."""
    flags, config = parse_step(argv)
    ranks, backend = flags.processes(CPU_RANKS)
    settings = make_settings(flags, config, ranks, backend, ["longspan", "bench", "step", *argv])
    record = run_on_ranks(step_ranks, (settings,), ranks, compile_cache=config.run.compile_cache)
    show_record(record, flags, text=record_text(record), markdown=record_markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

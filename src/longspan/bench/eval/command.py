"""`longspan bench eval`: evaluation at another degree than training, live, beside published figures."""

import sys
from collections.abc import Sequence

from longspan.bench.eval.flags import EvalBenchFlags, make_settings
from longspan.bench.eval.ranks import eval_ranks
from longspan.bench.eval.record import record_markdown, record_text
from longspan.bench.record import show_record
from longspan.cli.flags import parse_flags
from longspan.cli.processes import run_on_ranks, say

CPU_RANKS = 4


def main(argv: Sequence[str]) -> int:
    """Run the bench. Returns 0, or 1 where the losses at two degrees differ by more than rounding explains."""
    flags = parse_flags(EvalBenchFlags, argv, "longspan bench eval")
    ranks, backend = flags.processes(CPU_RANKS)
    settings = make_settings(flags, ranks, backend, ["longspan", "bench", "eval", *argv])
    for case in settings.left_out:
        say(f"{case.name} is left out: it runs on multiples of {case.ranks} ranks, here are {ranks}", sys.stderr)
    record = run_on_ranks(eval_ranks, (settings,), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_markdown(record))
    return 0 if all(row["good"] for row in record["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`longspan bench`: measure on this machine. Lists its benches, and hands over to the one that is named."""

from collections.abc import Sequence
from importlib import import_module

from longspan.errors import ConfigError

BENCHES = {
    "attention": "forward and backward of attention over all ranks, each communication type, beside torch's own",
    "calibrate": "the constants of a Cost for a model on this machine, for --cost of plan and simulate",
    "eval": "evaluation at another degree than training, live, beside published figures",
    "step": "whole training steps of a model under padded, fixed and dynamic plans, beside what they predict",
}


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "--list"):
        print(usage())
        return 0
    name, *arguments = argv
    if name not in BENCHES:
        raise ConfigError(f"longspan bench has no {name!r}; it has {', '.join(BENCHES)}")
    return import_module(f"longspan.bench.{name}.command").main(arguments)


def usage() -> str:
    """What `longspan bench` prints."""
    lines = "\n".join(f"  {name:<11}{text}" for name, text in BENCHES.items())
    return (
        f"usage: longspan bench NAME [flags]\n\n{lines}\n\n"
        "longspan bench NAME --help shows a bench's flags. Records that back a claim are kept in bench/records."
    )

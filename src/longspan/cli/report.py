"""`longspan report`: the page of a run's folder, or of a saved plan. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from longspan.cli.flags import Switch, parse_flags
from longspan.errors import ConfigError
from longspan.plan import Plan
from longspan.report import plan_page, write_report


@dataclass(frozen=True)
class ReportFlags:
    """Write one self-contained page about a run (report.html in its folder), or about a plan's JSON file."""

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR|PLAN.json")]
    """A run's folder, or a plan as `longspan plan --json` prints it."""
    out: str = ""
    """Where to write the page of a plan; empty: next to the plan, as .html."""
    json: Switch = False
    """Print {"report": PATH} on standard output."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    flags = parse_flags(ReportFlags, argv, "longspan report")
    target = Path(flags.target)
    if target.is_file():
        path = _plan_report(target, flags.out)
    elif flags.out:
        raise ConfigError(f"--out is for plans; a run's report goes into its folder, {target}/report.html")
    else:
        path = write_report(target)
    print(json.dumps({"report": str(path)}) if flags.json else path)
    return 0


def _plan_report(source: Path, out: str) -> Path:
    """Write the page of a saved plan; returns its path."""
    try:
        plan = Plan.from_json(source.read_bytes())
        path = Path(out) if out else source.with_suffix(".html")
        path.write_text(plan_page(plan, title=source.name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot make a report of {source}: {error.strerror}") from error
    return path

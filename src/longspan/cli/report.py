"""`longspan report`: the page of a run's folder, or of a saved plan; or a run that is followed. Imports no torch."""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from longspan.cli.flags import Word, parse_flags
from longspan.errors import ConfigError, LongspanError
from longspan.files import write_atomically
from longspan.plain_text import escape_controls
from longspan.plan import Plan
from longspan.report import plan_page, write_report


@dataclass(frozen=True)
class ReportFlags:
    """Write one self-contained page about a run (report.html in its folder), or about a plan's JSON file.

    With --follow, show a run while it trains instead: losses, tokens/s, the plan of the newest step, evaluations, saves
    and ranks, on a page of this machine that renews itself. Its address has a key, and is printed. It ends with the
    run, or with Ctrl-C, which leaves the run alone. For example:

    longspan report runs/first --follow --port 8765
    """

    target: Annotated[str, Word("RUN_DIR|PLAN.json", "a run's folder, or the JSON file of a plan", "runs/first")]
    """A run's folder, or a plan as `longspan plan --json` prints it."""
    out: str = ""
    """Where to write the page of a plan; empty: next to the plan, as .html."""
    follow: bool = False
    """Serve the page of a run that trains, or is about to, on 127.0.0.1, until the run has ended."""
    port: int = 0
    """With --follow: the port; 0: any free one. From another machine: ssh -L 8765:127.0.0.1:8765 HOST."""
    json: bool = False
    """Print {"report": PATH} on standard output; with --follow {"address": URL} at once, and {"state", "step", "steps"}
    at the end."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns 0."""
    flags = parse_flags(ReportFlags, argv, "longspan report")
    target = Path(flags.target)
    if flags.follow:
        return _follow_run(target, flags)
    if flags.port:
        raise ConfigError(f"--port {flags.port} is for --follow; without it longspan report writes a file")
    if target.is_file():
        path = Path(flags.out) if flags.out else target.with_suffix(".html")
        try:
            plan = Plan.from_json(target.read_bytes())
            text = plan_page(plan, title=target.name)
            if flags.out:
                path.write_text(text, encoding="utf-8")
            else:
                write_atomically(path, text)
        except OSError as error:
            raise ConfigError(f"cannot make a report of {target}: {error.strerror}") from error
        except LongspanError as error:
            raise ConfigError(f"cannot make a report of {target}: {error}; give a run, or a plan's file") from error
    elif flags.out:
        raise ConfigError(f"--out is for plans; a run's report goes into its folder, {target}/report.html")
    else:
        path = write_report(target, lambda note: print(escape_controls(note), file=sys.stderr))
    print(json.dumps({"report": str(path)}) if flags.json else path)
    return 0


def _follow_run(run_dir: Path, flags: ReportFlags) -> int:
    """Ctrl-C ends it; another signal is raised. Returns the exit code."""
    if run_dir.is_file() or flags.out:
        raise ConfigError(
            f"--follow takes the folder of a run, and no --out; {run_dir} as a plan: leave --follow out"
        )
    if not 0 <= flags.port < 1 << 16:
        raise ConfigError(f"--port is {flags.port}; give one from 1 to 65535, or 0 for any free one")
    from longspan.report.follow import Follower

    with Follower(run_dir, flags.port) as follower:
        live = follower.read_run()
        if live.state != "done":  # if the run has ended already, only the last line is printed
            state = "" if live.state == "running" else f" ({live.state_sentence()}; waits for one to begin)"
            line = f"following {run_dir}{state}: {follower.address}\nCtrl-C ends this; the run goes on"
            print(json.dumps({"address": follower.address}) if flags.json else line, flush=True)
        try:
            live = follower.wait_until_run_ends()
        except KeyboardInterrupt as interrupted:
            if getattr(interrupted, "number", signal.SIGINT) != signal.SIGINT:  # Ctrl-C alone is a usual end
                raise
            live = follower.read_run()
    end = {"state": live.state, "step": live.step, "steps": live.steps}
    ending = ""
    if live.state == "running":
        ending = ", and goes on"
    elif live.state in ("done", "stopped"):
        ending = f"; its page: {run_dir / 'report.html'}, or longspan report {run_dir}"
    print(json.dumps(end) if flags.json else f"{live.state_sentence()}{ending}", flush=True)
    return 0

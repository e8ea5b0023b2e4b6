"""Attention and whole steps at two commits, in turn on one machine: what a change of the source costs.

git worktree add ../before COMMIT
python bench/two_commits.py --before ../before/src --out bench/records/two-commits.json

Every round runs each bench at the earlier source and then at this one; a figure is the median over rounds of the
records' own medians. With an --out that exists, rounds are added to those that it has.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

YARN = ("--model.rope_scaling", "yarn")
BENCHES = {
    "attention": ["attention", "--no-peers", "--lengths"],
    "packed": ["attention", "--no-peers", "--documents", "8", "--types", "p2p,a2a", "--lengths"],
    "step": [*("step", "--planners", "fixed"), *YARN, "--train.activation_checkpointing", "selective", "--sequences"],
    # of a model that one GPU holds
    "small-step": ["step", "--planners", "fixed", "--model.preset", "qwen3-4b", "--repeats", "9", "--sequences"],
}
LENGTHS = {
    "attention": "16384,65536,131072",
    "packed": "16384,131072",
    "step": "65536,16384",
    "small-step": "16384",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder src of the earlier commit")
    parser.add_argument(
        "--now", type=Path, default=Path(__file__).parents[1] / "src", help="folder src of the later one"
    )
    parser.add_argument("--benches", default=",".join(BENCHES))
    parser.add_argument("--lengths", default="", help="of every bench, with commas between; empty: its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-seconds", type=float, default=540, help="no bench is begun after so many seconds")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    end = time.monotonic() + options.most_seconds
    for round_index in range(options.rounds):
        for bench in options.benches.split(","):
            if time.monotonic() < end:
                for which in ("before", "now") if round_index % 2 == 0 else ("now", "before"):
                    runs.append(_run(bench, which, getattr(options, which), options.lengths or LENGTHS[bench]))
                _write(runs, options.out)


def _run(bench: str, which: str, source: Path, lengths: str) -> dict[str, Any]:
    """One record of `longspan bench` with the package of that folder."""
    environment = {**os.environ, "PYTHONPATH": f"{source.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "longspan", "bench", *BENCHES[bench], lengths, "--out", str(out)]
        start = time.monotonic()
        done = subprocess.run(command, check=False, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        record = json.loads(out.read_text())
    print(f"{bench} {which}: {time.monotonic() - start:.0f} s", flush=True)
    return {"bench": bench, "which": which, **{key: record[key] for key in ("machine", "versions", "rows")}}


def _write(runs: list[dict[str, Any]], out: Path) -> None:
    out.write_text(json.dumps({"command": f"python {' '.join(sys.argv)}", "runs": runs}, indent=1) + "\n")
    table = "\n".join(_table(runs))
    out.with_suffix(".md").write_text(table + "\n")
    print(table, flush=True)


def _table(runs: list[dict[str, Any]]) -> Iterator[str]:
    machine, versions = runs[0]["machine"], runs[0]["versions"]
    gpus = machine.get("gpus") or []
    yield "# Attention and steps at two commits, in turn"
    yield ""
    yield (
        f"Machine: {f'{len(gpus)} x {gpus[0]}' if gpus else machine['processor']}. "
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}."
    )
    yield ""
    yield "| bench | rounds | before, ms | now, ms | now / before | before, least and most |"
    yield "| --- | --- | --- | --- | --- | --- |"
    seconds: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for row in run["rows"]:
            length = f", {row['length']:,} rows" if "length" in row else ""
            name = f"{run['bench']}: {row['name']}{length}"
            seconds.setdefault(name, {"before": [], "now": []})[run["which"]].append(row["seconds"])
    for name, figures in seconds.items():
        if figures["before"] and figures["now"]:
            before, now = (1000 * statistics.median(figures[which]) for which in ("before", "now"))
            least, most = (1000 * f(figures["before"]) for f in (min, max))
            yield (
                f"| {name} | {len(figures['now'])} | {before:.2f} | {now:.2f} | {now / before:.3f} "
                f"| {least:.2f} to {most:.2f} |"
            )


if __name__ == "__main__":
    main()

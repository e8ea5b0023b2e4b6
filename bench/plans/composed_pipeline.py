"""An evaluation of one document through pipeline stages, composed from measured stages and hops.

    python bench/plans/composed_pipeline.py
    python bench/plans/composed_pipeline.py --whole FOLDER --machine FILE.json    # of runs of bench/on_gpus.py

One document is one batch, so one stage computes at a time: its time is that of all layers on one stage, and a hop of
its rows between stages for each stage but one. `--whole` is the folder with `evaluation-whole-*.json`; without it the
times stand in measured.json. Where the folder has evaluation-whole-pp2.json, the rule is judged by it.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table
from longspan.plan import Machine

RECORD = "evaluation-whole-2xH200"
PUBLISHED = {("8k-tp1", 8192): (53.1, 32.3), ("8k-tp1", 16384): (117.7, 62.8)}  # of PP 4, on 8 H100s, in ms
COLUMNS = ("tokens", "degree", "one stage, ms", "a hop, ms", "PP 2", "measured", "PP 4", "published PP 4")


def recorded_times() -> dict[tuple[str, int, int], float]:
    """Seconds by case, tokens and degree."""
    rows = json.loads((Path(__file__).parents[1] / "records/measured.json").read_text())["rows"]
    return {
        (row["name"].split()[0], row["by"]["lengths"][0], row["by"]["cp"][0]): row["seconds"]
        for row in rows
        if row["record"] == RECORD
    }


def folder_times(folder: Path) -> dict[tuple[str, int, int], float]:
    """Of each degree the mean after a training step at it."""
    return {
        (row["name"], row["tokens"], run["degree"]): run["mean"]
        for file in sorted(folder.glob("evaluation-whole-*.json"))
        for row in json.loads(file.read_text())["rows"]
        for run in row["runs"]
        if run.get("degree") and run["trained"] == run["degree"]
    }


def lines(times: dict[tuple[str, int, int], float], machine: Machine) -> list[tuple[str, ...]]:
    width = preset_config("qwen3-4b").hidden_size
    hop_of = machine.inside.point
    table = list[tuple[str, ...]]()
    for (case, tokens, degree), seconds in sorted(times.items(), key=lambda item: item[0][1:]):
        if case != "8k-tp1":
            continue
        hop = hop_of.latency + 2 * tokens / degree * width / hop_of.bytes_per_second  # in bfloat16
        measured = times.get((f"{tokens >> 10}k-pp2", tokens, degree))
        published = PUBLISHED.get((case, tokens), ())[degree - 1 : degree]
        table.append(
            (
                *(f"{tokens:,}", str(degree), f"{1e3 * seconds:.1f}", f"{1e3 * hop:.2f}"),
                f"{1e3 * (seconds + hop):.1f}",
                "" if measured is None else f"{1e3 * measured:.1f} ({(seconds + hop) / measured:.2f})",
                f"{1e3 * (seconds + 3 * hop):.1f}",
                "".join(map(str, published)),
            )
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", type=Path, help="folder of evaluation-whole-*.json")
    parser.add_argument("--machine", type=Path, help="a machine of longspan bench calibrate; else an H200")
    options = parser.parse_args()
    machine = Machine.known("H200")
    if options.machine:
        machine = Machine.from_json(json.loads(options.machine.read_text()))
    times = folder_times(options.whole) if options.whole else recorded_times()
    print(markdown_table(COLUMNS, lines(times, machine)))


if __name__ == "__main__":
    main()

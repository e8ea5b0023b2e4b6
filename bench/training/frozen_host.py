"""The record of frozen weights on the host, of the files that `bench/on_gpus.py --only frozen-host-…` wrote. No GPU.

    python bench/training/frozen_host.py runs/gpus/frozen-host-*.json --out bench/records/frozen-on-host-H200.md

A file is one row; two that run the same measures, or the same documents within two limits, are a ratio.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from longspan.bench.benches import origin_text
from longspan.plain_text import gib_text, markdown_table
from longspan.plan.memory.memory_plan import policies_text

COLUMNS = (
    *("run", "rows", "limit", "weights", "layers keep", "seconds", "tokens/s", "predicted", "off"),
    *("peak", "planned", "off", "host"),
)
RATIOS = {  # what speed is compared, and the aim
    ("70b-same", "70b-same-device"): 0.97,
    ("70b", "70b-best"): 0.95,
    ("a3b-same", "a3b-same-device"): 0.95,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    records = {file.stem.removeprefix("frozen-host-"): json.loads(file.read_text()) for file in flags.files}
    flags.out.write_text(page_of(records))


def page_of(records: dict[str, dict[str, Any]]) -> str:
    names = ",".join(f"frozen-host-{name}" for name in records)
    first = next(iter(records.values()))
    seconds = {name: record["rows"][0]["seconds"] for name, record in records.items()}
    ratios = [
        f"- {name} runs at {seconds[other] / seconds[name]:.3f} of the speed of {other} (aim: {aim:g})."
        for (name, other), aim in RATIOS.items()
        if name in seconds and other in seconds
    ]
    lines = [
        "# Frozen weights in 4 bits on the host: LoRA on one H200 within the memory of a smaller card",
        "Random weights in bfloat16, packed as nf4, adapters of rank 16, learning rate 0, one document a step. Beyond "
        "the limit, less a context of 1.27 GiB, torch runs out of memory. Seconds are of the second step, peaks what "
        "torch allocates, and `planned` is without context and communicators.",
        origin_text(first | {"command": f"python bench/on_gpus.py --only {names}"}),
        markdown_table(COLUMNS, [_row(name, record) for name, record in records.items()]),
        "\n".join(ratios),
    ]
    return "\n\n".join(filter(None, lines)) + "\n"


def _row(name: str, record: dict[str, Any]) -> tuple[str, ...]:
    row = record["rows"][0]
    memory = record["memory"]
    limit = record["configuration"]["train"]["device_memory_limit"]
    planned = memory["device"]["total"] - memory["device"]["communicators"]
    tiles = f", tiles of {memory['mlp_tile_tokens']:,}" if memory["mlp_tile_tokens"] else ""
    return (
        *(name, f"{record['tokens']:,}", gib_text(limit) if limit else "–"),
        "host" if memory["offload_weights"] else "device",
        f"{policies_text(memory['checkpoint_policies'])}{tiles}",
        *(f"{row['seconds']:.3f}", f"{row['tokens_per_second_per_device']:,.0f}", f"{row['predicted_seconds']:.3f}"),
        f"{100 * (row['prediction_ratio'] - 1):+.1f} %",
        *(gib_text(row["peak_bytes"]), gib_text(planned), f"{100 * (row['peak_bytes'] / planned - 1):+.1f} %"),
        gib_text(memory["host"]["total"]),
    )


if __name__ == "__main__":
    main()

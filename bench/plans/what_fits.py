"""The longest document that fits, by model, kind and number of GPUs, as `longspan plan --longest` says. Needs no GPU.

    python bench/plans/what_fits.py                          # bench/records/what-fits.md and .json, two minutes
    python bench/plans/what_fits.py --gpus 1,2 --out /tmp/what-fits.json

Float32 masters and AdamW, arithmetic in bfloat16, one document over all GPUs, 92 % of each filled;
128 GiB of the host for each GPU. A run may recompute, and move activations, optimizer states and weights to the host.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from longspan.model.presets import PRESETS
from longspan.plain_text import markdown_table

RECORDS = Path(__file__).parents[1] / "records"
MODELS = ("qwen3-4b", "qwen3-8b", "qwen3-30b-a3b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="h100,h200")
    parser.add_argument("--gpus", default="1,2,4,8")
    parser.add_argument("--out", type=Path, default=RECORDS / "what-fits.json")
    flags = parser.parse_args()
    rows = [
        {"model": model, "gpu": kind, "gpus": int(count)} | _longest(model, kind, count)
        for model in MODELS
        for kind in flags.kinds.split(",")
        for count in flags.gpus.split(",")
    ]
    command = "python bench/plans/what_fits.py"
    flags.out.write_text(json.dumps({"bench": "what fits", "command": command, "rows": rows}, indent=1) + "\n")
    flags.out.with_suffix(".md").write_text(_page(rows, command))


def _longest(model: str, kind: str, gpus: str) -> dict[str, Any]:
    """Tokens of the longest document; 0 where nothing fits."""
    with TemporaryDirectory() as folder:
        values = {"model_type": PRESETS[model].model_type, **PRESETS[model].values}
        (Path(folder) / "config.json").write_text(json.dumps(values))
        words = ["--model", folder, "--gpu", kind, "--gpus", gpus, "--longest", "--json"]
        run = subprocess.run(
            [sys.executable, "-m", "longspan", "plan", *words], capture_output=True, text=True, check=False
        )
    answer = json.loads(run.stdout)
    return {"auto": answer["longest"]}


def _page(rows: list[dict[str, Any]], command: str) -> str:
    cells = [(row["model"], row["gpu"], str(row["gpus"]), f"{row['auto']:,}") for row in rows]
    settings = " ".join((__doc__ or "").rpartition("\n\n")[2].split())
    return (
        "# What fits where: tokens of the longest document\n\n"
        f"Command: `{command}`. {settings}\n\n"
        f"{markdown_table(('model', 'GPU', 'GPUs', 'longest'), cells)}\n"
    )


if __name__ == "__main__":
    main()

"""Seconds and host memory of reading a folder of weights: whole, and packed in 4 bits as they are read.

    python bench/training/read_folder.py --preset qwen3-8b --folder /tmp/qwen3-8b --out read.json

The folder is written first, where it is not there: random bfloat16 weights of the preset's shape, in files of 5 GB as
transformers saves them. Each way is read by a process of its own, as LoRA's base, in turn, `--repeats` times.
`anonymous` is the most that the process took of the host beyond files and what it had before reading; `two_layers` are
the bytes of two decoder layers.
"""

import argparse
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record, seconds_now, write_page

from longspan import Layout, World, load_model, prepare
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table

WAYS = ("whole", "nf4")
COLUMNS = ("frozen", "seconds", "anonymous", "two layers", "weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-8b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/read_folder"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("read.json"))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.way:
        print(json.dumps(read(options.folder, options.way)))
        return 0
    if not (options.folder / "config.json").exists():
        write_folder(options)
    rows = list[dict[str, Any]]()
    for way in WAYS * options.repeats:
        words = [sys.executable, __file__, "--folder", str(options.folder), "--way", way]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(ended.stderr[-2000:])
        rows.append(json.loads(ended.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    record = open_record("reading a folder", None, backend, Path(__file__).parent, rows=rows)
    page = markdown_table(COLUMNS, [table_row(row) for row in rows])
    write_page(record, options.out, f"Reading {options.preset}", page)
    return 0


def write_folder(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    config = preset_config(options.preset)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(options.folder, max_shard_size="5GB")


def read(folder: Path, way: str) -> dict[str, Any]:
    with World(Layout(ranks=1)) as world:
        model = load_model(str(folder), sharded=True, dtype=torch.bfloat16)
        layer_bytes = sum(parameter.numel() * 2 for parameter in model.model.layers[0].parameters())
        torch.empty(1, device=world.device)  # so that CUDA's own memory counts as before
        before = anonymous_bytes()
        most = [before]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                most[0] = max(most[0], anonymous_bytes())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        start = seconds_now()
        prepared = prepare(add_lora(model, NewAdapter(rank=16)), world, frozen=way, compute_dtype=torch.bfloat16)
        seconds = seconds_now() - start
        done.set()
        watcher.join()
        held = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in prepared.parameters())
        return {
            "frozen": way,
            "seconds": seconds,
            "anonymous_bytes": most[0] - before,
            "two_layers_bytes": 2 * layer_bytes,
            "held_bytes": held,
        }


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def table_row(row: dict[str, Any]) -> list[str]:
    gib = [f"{row[name] / 2**30:.2f} GiB" for name in ("anonymous_bytes", "two_layers_bytes", "held_bytes")]
    return [row["frozen"], f"{row['seconds']:.1f}", *gib]


if __name__ == "__main__":
    sys.exit(main())

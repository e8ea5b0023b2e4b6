"""Loading a Hugging Face folder: memory of the host that a rank takes, and seconds, whole and sharded.

python bench/data/loading.py --ranks 8 --out bench/records/loading.json               folders made for this, on CPUs
torchrun --nproc-per-node 4 bench/data/loading.py --folder Qwen3-8B --out record.json     a folder of yours, on GPUs

Weights lie in bfloat16 files and are loaded in float32, so that none of a rank's memory is the file's. The rise is of
anonymous resident memory, sampled every two milliseconds while the model is loaded and prepared.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from process_memory import resident, sampled
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from longspan import Layout, World, prepare
from longspan.bench.record import origin_text, write_record
from longspan.model import load_model
from longspan.testing import run_ranks

SIZES = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 1024}
MODELS: dict[str, Any] = {
    "dense": lambda: Qwen3Config(
        **SIZES, num_hidden_layers=16, intermediate_size=3072, vocab_size=32000, tie_word_embeddings=False
    ),
    "tied": lambda: Qwen3Config(
        **SIZES, num_hidden_layers=16, intermediate_size=3072, vocab_size=48000, tie_word_embeddings=True
    ),
    "16 experts": lambda: Qwen3MoeConfig(
        **SIZES, num_hidden_layers=8, moe_intermediate_size=512, num_experts=16, num_experts_per_tok=2, vocab_size=16000
    ),
    "12 experts": lambda: Qwen3MoeConfig(
        **SIZES, num_hidden_layers=8, moe_intermediate_size=768, num_experts=12, num_experts_per_tok=2, vocab_size=16000
    ),
}
HOMES = {"FSDP2": {}, "tp 2": {"tp": 2}, "pp 2": {"pp": 2}, "ep 4": {"ep": 4}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--folder", type=Path, help="a Hugging Face folder; without it folders are made")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record = open_record("loading", options.out, "nccl" if torch.cuda.is_available() else "gloo", Path(__file__).parent)
    record.setdefault("rows", [])
    if options.folder:
        row = {"model": options.folder.name, "home": "FSDP2", "sharded": True, **load(0, str(options.folder), {}, True)}
        if int(os.environ.get("RANK", "0")) == 0:
            _keep(record, row, options.out)
        return
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            sizes = _save(MODELS[name](), Path(folder))
            for home, axes in HOMES.items():
                for sharded in (True, False) if "ep" not in axes or "experts" in name else ():
                    measured = run_ranks(load, options.ranks, folder, axes, sharded, timeout=600)[0]
                    row = {"model": name, "home": home, "sharded": sharded, **sizes, **measured}
                    _keep(record, row, options.out)


def _save(config: Any, folder: Path) -> dict[str, int]:
    """Write a folder of random weights in bfloat16; its size and its largest tensor's, in float32."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")
    largest = max(x.numel() for file in folder.glob("*.safetensors") for x in load_file(file).values())
    return {"bytes": 4 * sum(x.numel() for x in model.parameters()), "largest": 4 * largest}


def load(_: int, folder: str, axes: dict[str, int], sharded: bool) -> dict[str, Any]:
    """The rise of anonymous memory and the seconds of loading and preparing, the worst of all ranks."""
    ranks = int(os.environ["WORLD_SIZE"])
    with World(Layout(ranks=ranks, **axes)) as world:
        preset = "qwen3-moe-tiny" if "ep" in axes else "qwen3-tiny"
        prepare(load_model(preset=preset, vocab_size=64), world)  # libraries and communicators
        world.control.barrier()
        start = time.monotonic()
        with _peak() as rise:
            model = prepare(load_model(folder, sharded=sharded), world)
        seconds = time.monotonic() - start
        local = [getattr(x, "_local_tensor", x) for x in model.parameters()]
        device = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
        here = [sum(float(x.double().abs().sum()) for x in local), float(rise[0]), float(device), seconds]
        checksums, *worst = zip(*world.control.gather_objects(here), strict=True)
        names = ("rise", "device", "seconds")
        return {"ranks": ranks, "checksum": sum(checksums), **dict(zip(names, map(max, worst), strict=True))}


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The rise of own memory until the block ends."""
    rise, before = [0], resident()["RssAnon"]

    def sample() -> None:
        rise[0] = max(rise[0], resident()["RssAnon"] - before)

    with sampled(sample, every=0.002):
        yield rise


def _keep(record: dict[str, Any], row: dict[str, Any], out: Path) -> None:
    print(row, flush=True)
    record["rows"].append(row)
    write_record(record, out, "\n".join(_markdown(record)) + "\n")


def _markdown(record: dict[str, Any]) -> Iterator[str]:
    yield "# Loading a folder: what a rank's host memory rises by"
    yield ""
    yield origin_text(record)
    yield ""
    yield "| model | home | ranks | way | float32 MB | an equal part + largest tensor, MB | rise, MB | device, MB | s |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in record["rows"]:
        way = "sharded" if row["sharded"] else "whole, then prepare"
        total, largest = row.get("bytes", 0), row.get("largest", 0)
        megabytes = [total, total / row["ranks"] + largest, row["rise"], row["device"]]
        cells = [row["model"], row["home"], str(row["ranks"]), way]
        cells += [f"{number / 1e6:,.0f}" if number else "" for number in megabytes]
        yield f"| {' | '.join(cells)} | {row['seconds']:.1f} |"


if __name__ == "__main__":
    main()

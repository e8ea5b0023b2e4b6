"""Bytes that FSDP2 copies in a step, by operator: into and out of gathers, into and out of sums of gradients.

    python bench/training/fsdp_copies.py --ranks 2 --out bench/records/fsdp-copies.json

Ranks are processes of this machine over gloo, on a small model: which operators run, how often and over how many bytes
does not depend on the device. Each figure is bytes read and written for each of the model's numbers and step, of one
rank, with bfloat16 arithmetic over float32; times are what they take at `--bandwidth` for `--billions` of numbers.
Rows: parameters gathered twice a step, and once (`parallel.reshard_after_forward = false`).
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan import Layout, World, plan_fixed, prepare, run_step
from longspan.bench.record import origin_text, write_record
from longspan.cli.machine import machine_facts
from longspan.comm import run_local
from longspan.data.document import synthetic_documents
from longspan.model import load_model
from longspan.plain_text import markdown_table
from longspan.run.result import versions
from longspan.train import build_optimizer

LENGTHS = (64, 64)
COPIES = {
    "aten._foreach_copy_": "parameters to bfloat16, and into a gather",
    "fsdp.split_with_sizes_copy": "out of a gather",
    "fsdp.chunk_cat": "gradients to float32, into their sum",
}
CASES = {"gathered twice": True, "gathered once": False}


class CopiedBytes(TorchDispatchMode):
    """Counts calls of operators that copy for FSDP2, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = ".".join(str(function).split(".")[:2])
        if name in COPIES:
            self.calls[name] += 1
            self.bytes[name] += sum(x.nbytes for x in tree_leaves((arguments, named)) if isinstance(x, Tensor))
        return function(*arguments, **(named or {}))


def main() -> None:
    """Count both cases, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--billions", type=float, default=8.19)
    parser.add_argument("--bandwidth", type=float, default=3.5e12, help="bytes a second")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        run_local(count_copies, options.ranks, (options.ranks, str(file)))
        rows = json.loads(file.read_text(encoding="utf-8"))
    for row in rows:
        row["ms"] = 1e3 * row["bytes_of_a_number"] * options.billions * 1e9 / options.bandwidth
    table = markdown_table(
        ["parameters", "copies", "calls a step", "bytes of a number", f"ms, {options.billions:g} B numbers"],
        [[r["case"], r["what"], str(r["calls"]), f"{r['bytes_of_a_number']:.2f}", f"{r['ms']:.1f}"] for r in rows],
    )
    print(table)
    if options.out:
        command = " ".join(["python", *sys.argv])
        record = {"bench": "fsdp-copies", "machine": machine_facts(), "versions": versions(), "command": command}
        record |= {"ranks": options.ranks, "rows": rows}
        write_record(record, options.out, f"# Copies of FSDP2\n\n{table}\n\n{origin_text(record)}\n")


def count_copies(rank: int, ranks: int, file: str) -> None:
    """Count the copies of one step in every case, on the first rank."""
    rows = list[dict[str, Any]]()
    for case, reshards in CASES.items():
        with World(Layout(ranks), backend="gloo") as world:
            model = load_model(None, "qwen3-tiny", vocab_size=512)
            numbers = sum(parameter.numel() for parameter in model.parameters())
            settings = {"compute_dtype": torch.bfloat16, "reshard_after_forward": reshards}
            model = prepare(model, world, probe=False, **settings)
            plan = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=64)
            documents, optimizer = synthetic_documents(LENGTHS, 512), build_optimizer(model)
            run_step(model, plan, documents, world, optimizer)
            with CopiedBytes() as copied:
                run_step(model, plan, documents, world, optimizer)
            rows += [
                {"case": case, "what": what, "operator": name, "calls": copied.calls[name]}
                | {"bytes_of_a_number": copied.bytes[name] / numbers}
                for name, what in COPIES.items()
            ]
    if rank == 0:
        Path(file).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()

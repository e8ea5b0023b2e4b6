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
from longspan.train import build_optimizer
from longspan.versions import versions

LENGTHS = (64, 64)
COPIES = {
    "aten._foreach_copy_": "parameters to bfloat16",
    "fsdp.all_gather_copy_in": "into a gather",
    "fsdp.split_with_sizes_copy": "out of a gather",
    "fsdp.chunk_cat": "gradients to float32, into their sum",
}
CASES = {"gathered twice": True, "gathered once": False}
WHY = """
What of it can be left out by what torch 2.13 offers (read in `torch/distributed/fsdp/_fully_shard`):

- *Gradients to float32*: sums are in float32, so that a gradient is read once in bfloat16 and written once in float32
  in any layout, 6 bytes; `chunk_cat` lays it out by ranks in the same pass. Nothing is left to cut, but by sums in
  bfloat16 (`reduce_dtype`), which round once for each rank.
- *Out of a gather*: a gather has the shards of all parameters of a block, rank after rank, and a parameter is whole in
  one run of memory: 4 bytes a gather. A custom gather (`set_custom_all_gather`) and memory of the process group
  (`set_allocate_memory_from_process_group_for_comm`) choose where the gather lies and how it is sent;
  `foreach_all_gather_copy_out` copies out of it in any case, also for a block of a single parameter. Shards of another
  dim (`shard_placement_fn`) add a copy each way. A message for each parameter, received in place, would need none, and
  is not offered: both functions would have to be replaced.
- *Into a gather*: what is to be sent is first made in bfloat16 and then copied to its place, of which the second copy
  is one of 4 bytes / ranks. It is an operator that `foreach_all_gather` always calls, after the cast.
- *How often*: parameters that stay whole between forward and backward (`parallel.reshard_after_forward = false`, where
  memory allows) are gathered and copied out once. An evaluation gathers once for all its micro-batches.

Measured share: of a step of Qwen3-8B over 16,384 rows on four H200 (714 ms, `step-4xH200-64k.md`) `chunk_cat` takes
24.6 ms (3.4 %) in 37 calls and `split_with_sizes_copy` 18.1 ms (2.5 %) in 73.
"""


class CopiedBytes(TorchDispatchMode):
    """Counts calls of operators that copy for FSDP2, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = ".".join(str(function).split(".")[:2])
        if name in COPIES:
            self.calls[name] += 1
            # A gather is given whole, of which this rank's part is written: as much as is read.
            tensors, times = (arguments[0], 2) if name == "fsdp.all_gather_copy_in" else ((arguments, named), 1)
            self.bytes[name] += times * sum(x.nbytes for x in tree_leaves(tensors) if isinstance(x, Tensor))
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
        write_record(record, options.out, f"# Copies of FSDP2\n\n{table}\n{WHY}\n{origin_text(record)}\n")


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

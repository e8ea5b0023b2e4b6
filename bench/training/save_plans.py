"""Seconds of CPU that the first rank plans a checkpoint, by ranks, in one process.

python bench/training/save_plans.py --out bench/records/save-plans.json

The lists of all ranks are made here as FSDP2's shards have them (weights, two moments and a count of each tensor), and
go through the planner of a checkpoint. No files are written and nothing travels. Seconds grow with ranks times tensors:
few tensors are planned, and the seconds of a 70B model's 723 are those times the quotient.
"""

import argparse
import gc
import pickle
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record, write_page
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from longspan.checkpoint.saver import make_save_planner
from longspan.plain_text import markdown_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2816])
    parser.add_argument("--tensors", type=int, default=12, help="that are planned, of 723")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = open_record("plans of saves", None, "cpu", Path(__file__).parent) | {"tensors": options.tensors}
    record["rows"] = rows = [measure(ranks, options.tensors) for ranks in options.ranks]
    head = ["ranks", "items of 723 tensors", "sent to one rank, MB", "plan, s", "plan kept, s"]
    lines = [
        [
            f"{row['ranks']:,}",
            *(f"{row[name] * row['scale'] / unit:,.0f}" for name, unit in (("items", 1), ("sent_bytes", 1e6))),
            f"{row['plan_seconds'] * row['scale']:,.1f}",
            f"{row['cached_seconds']:.3f}",
        ]
        for row in rows
    ]
    write_page(record, options.out, "Plans of saves", markdown_table(head, lines))


def measure(ranks: int, tensors: int) -> dict[str, Any]:
    plans = [list_of_rank(rank, ranks, tensors) for rank in range(ranks)]
    sent = ranks * len(pickle.dumps(plans[0]))
    planner = make_save_planner()
    gc.freeze()  # a plan of few tensors would be charged for collecting what was there before
    started = time.process_time()
    planner.create_global_plan(plans)
    seconds = time.process_time() - started
    started = time.process_time()
    again, _ = planner.create_global_plan([SavePlan([], usable=False)] * ranks)
    cached = time.process_time() - started
    assert not any(plan.usable for plan in again)
    return {
        "ranks": ranks,
        "items": sum(len(plan.items) for plan in plans),
        "sent_bytes": sent,
        "plan_seconds": seconds,
        "cached_seconds": cached,
        "scale": 723 / tensors,
    }


def list_of_rank(rank: int, ranks: int, tensors: int) -> SavePlan:
    """What a rank under FSDP2 lists of `tensors` matrices."""
    items = list[WriteItem]()
    properties = TensorProperties(dtype=torch.float32)
    whole = torch.Size([ranks * 4, 8])
    part = torch.Size([4, 8])
    scalar = torch.Size([])
    for i in range(tensors):
        name = f"model.layers.{i}.mlp.down_proj.weight"
        for kind in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            offsets = torch.Size([rank * 4, 0])
            data = TensorWriteData(ChunkStorageMetadata(offsets, part), properties, whole)
            items.append(WriteItem(MetadataIndex(kind, offsets), WriteItemType.SHARD, tensor_data=data))
        count = TensorWriteData(ChunkStorageMetadata(scalar, scalar), properties, scalar)
        index = MetadataIndex(f"optimizer.state.{name}.step", scalar)
        items.append(WriteItem(index, WriteItemType.TENSOR, tensor_data=count))
    return SavePlan(items, planner_data={item.index.fqn: ("optimizer", item.index.fqn) for item in items})


if __name__ == "__main__":
    main()

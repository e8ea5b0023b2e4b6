"""Seconds of CPU that the first rank plans a checkpoint, by ranks, in one process.

python bench/training/save_plans.py --out bench/records/save-plans.json

The lists of all ranks are made here as FSDP2's shards have them (weights and two moments of each tensor, and, where all
ranks list them, ten settings and a count of each), and go through the planner and the tables of a checkpoint. No files
are written and nothing travels. Seconds grow with ranks times tensors: few tensors are planned, and the seconds of a
70B model's 723 are those times the quotient.
"""

import argparse
import pickle
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from longspan.bench.record import origin_text, write_record
from longspan.checkpoint.metadata import metadata_text
from longspan.checkpoint.save_plan import CachedPlanner, PlanCache
from longspan.plain_text import markdown_table

SETTINGS = 10  # values of each parameter in param_groups, and a count of its steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2816])
    parser.add_argument("--tensors", type=int, default=12, help="that are planned, of 723")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = open_record("plans of saves", None, "cpu", Path(__file__).parent) | {"tensors": options.tensors}
    record["rows"] = rows = [
        measure(ranks, options.tensors, every=every) for ranks in options.ranks for every in (False, True)
    ]
    text = f"{plans_table(rows)}\n\n{origin_text(record)}\n"
    if options.out:
        write_record(record, options.out, f"# Plans of saves\n\n{text}")
    print(text)


def measure(ranks: int, tensors: int, *, every: bool) -> dict[str, Any]:
    """Plan a save of so many ranks; with `every` all of them list settings and counts."""
    plans = [list_of_rank(rank, ranks, tensors, values=every or rank == 0) for rank in range(ranks)]
    sent = len(pickle.dumps(plans[0])) + (ranks - 1) * len(pickle.dumps(plans[-1]))
    planner = CachedPlanner(PlanCache())
    started = time.process_time()
    planned, metadata = planner.create_global_plan(plans)
    seconds = time.process_time() - started
    started = time.process_time()
    again, _ = planner.create_global_plan([SavePlan([], usable=False)] * ranks)
    cached = time.process_time() - started
    assert not any(plan.usable for plan in again)
    places = {item.index: _StorageInfo("__0_0.distcp", 0, 1) for plan in planned for item in plan.items}
    started = time.process_time()
    text = metadata_text(metadata.state_dict_metadata, places)
    metadata.storage_data = places
    size = len(pickle.dumps(metadata)) + len(text)
    finished = time.process_time() - started
    planner._cache.forget()
    return {
        "ranks": ranks,
        "listed_by": "every rank" if every else "one rank",
        "items": sum(len(plan.items) for plan in plans),
        "sent_bytes": sent,
        "plan_seconds": seconds,
        "cached_seconds": cached,
        "finish_seconds": finished,
        "table_bytes": size,
        "scale": 723 / tensors,
    }


def list_of_rank(rank: int, ranks: int, tensors: int, *, values: bool) -> SavePlan:
    """What a rank under FSDP2 lists of `tensors` matrices."""
    items, names = list[WriteItem](), dict[str, Any]()
    properties = TensorProperties(dtype=torch.float32)
    whole, part = torch.Size([ranks * 4, 8]), torch.Size([4, 8])
    for i in range(tensors):
        name = f"model.layers.{i}.mlp.down_proj.weight"
        for kind in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            offsets = torch.Size([rank * 4, 0])
            data = TensorWriteData(ChunkStorageMetadata(offsets, part), properties, whole)
            items.append(WriteItem(MetadataIndex(kind, offsets), WriteItemType.SHARD, tensor_data=data))
        if values:
            count = TensorWriteData(ChunkStorageMetadata(torch.Size([]), torch.Size([])), properties, torch.Size([]))
            index = MetadataIndex(f"optimizer.state.{name}.step", torch.Size([]))
            items.append(WriteItem(index, WriteItemType.TENSOR, tensor_data=count))
            settings = (MetadataIndex(f"optimizer.param_groups.{name}.{key}") for key in range(SETTINGS))
            items += [WriteItem(index, WriteItemType.BYTE_IO) for index in settings]
    if values:
        names = {item.index.fqn: ("optimizer", item.index.fqn) for item in items}
    return SavePlan(items, planner_data=names)


def plans_table(rows: list[dict[str, Any]]) -> str:
    """The simulated plans, scaled to 723 tensors."""
    head = ["ranks", "values listed by", "items of 723 tensors", "sent to one rank, MB", "plan, s", "plan kept, s"]
    head += ["tables, s", "tables, MB"]
    lines = [
        [
            f"{row['ranks']:,}",
            row["listed_by"],
            f"{row['items'] * row['scale']:,.0f}",
            f"{row['sent_bytes'] * row['scale'] / 1e6:,.0f}",
            f"{row['plan_seconds'] * row['scale']:,.1f}",
            f"{row['cached_seconds']:.3f}",
            f"{row['finish_seconds'] * row['scale']:,.1f}",
            f"{row['table_bytes'] * row['scale'] / 1e6:,.0f}",
        ]
        for row in rows
    ]
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()

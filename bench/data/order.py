"""The order of a large corpus's documents: memory of a rank and of its planning process, and seconds.

python bench/data/order.py --label after --out bench/records/order.json

Lengths of documents are made and lie in a file, as those of a corpus do. Each case runs in a process of its own, which
has imported torch and the order before anything is measured: `make` makes the order and its first step, `late` makes it
and takes step 10,000 first, as a resumed run does, `epoch` walks to the end of the first epoch and takes the steps
around it, `planning` loads the order as the process that plans ahead does. Peak memory is over what was resident
before: anonymous, which is the process's own, and of files, which ranks share and the system may take back.
"""

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from bench.begun import open_record
from process_memory import resident, sampled

from longspan.bench.record import origin_text, write_record
from longspan.data.step_order import StepOrder

TOKENS_PER_STEP, LATE, SEED, HELD_OUT = 65_536, 10_000, 0, 32
CASES = ("make", "late", "epoch", "planning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--label", default="after", help="what the rows are called; rows of this name are replaced")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(options.case, options.folder)))
        return
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        draw = np.random.default_rng(SEED)
        lengths = np.clip(draw.lognormal(6.0, 1.2, options.documents), 2, 2**20).astype(np.uint32)
        np.save(Path(folder, "lengths.npy"), lengths)
        del lengths
        for case in options.cases.split(","):
            command = [sys.executable, __file__, "--case", case, "--folder", folder]
            answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append({"label": options.label, "case": case, "documents": options.documents, **answer})
            print(rows[-1], flush=True)
    if options.out:
        record = open_record("order", None, "none", Path(__file__).parent)
        kept = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
        record["rows"] = [row for row in kept if row["label"] != options.label] + rows
        write_record(record, options.out, "\n".join(_markdown(record)) + "\n")


def measured(case: str, folder: Path) -> dict[str, Any]:
    """The seconds of each part of a case, the memory that it took, and what of it is still held."""
    torch.zeros(1)
    seconds = dict[str, float]()
    run: Callable[[Path, dict[str, float]], object] = globals()[f"_{case}"]
    with _peak() as rise:
        held = [run(folder, seconds)]
    memory = {"peak_own": rise[0], "peak_files": rise[1], "held_own": _own_and_files()[0] - rise[2]}
    held.clear()
    tracemalloc.start()
    held = [run(folder, {})]
    largest = sorted(tracemalloc.take_snapshot().statistics("lineno"), key=lambda s: -s.size)[:6]
    tracemalloc.stop()
    held.clear()
    objects = [
        f"{s.traceback[0].filename.rpartition('site-packages/')[2].rpartition('src/')[2]}:{s.traceback[0].lineno} "
        f"{s.size / 1e6:.0f} MB"
        for s in largest
        if s.size > 1e6
    ]
    return {"seconds": {name: round(value, 6) for name, value in seconds.items()}, **memory, "objects": objects}


def _order(folder: Path, epochs: float = 0.0) -> StepOrder:
    lengths = np.load(folder / "lengths.npy", mmap_mode="r")
    return StepOrder(lengths, tokens_per_step=TOKENS_PER_STEP, seed=SEED, eval_documents=HELD_OUT, epochs=epochs)


def _make(folder: Path, seconds: dict[str, float]) -> StepOrder:
    with _timed(seconds, "make"):
        order = _order(folder)
    with _timed(seconds, "first step"):
        order.documents_of_step(0)
    with _timed(seconds, "each of the next 1000 steps"):
        for step in range(1, 1001):
            order.documents_of_step(step)
    seconds["each of the next 1000 steps"] = seconds.get("each of the next 1000 steps", 0.0) / 1000
    (folder / "order.pickle").write_bytes(sent := pickle.dumps(order))
    seconds["MB sent to the planning process"] = len(sent) / 1e6
    return order


def _late(folder: Path, seconds: dict[str, float]) -> StepOrder:
    order = _order(folder)
    with _timed(seconds, f"step {LATE}"):
        order.documents_of_step(LATE)
    return order


def _epoch(folder: Path, seconds: dict[str, float]) -> StepOrder:
    order = _order(folder, epochs=1.0)
    with _timed(seconds, "to the last step of the epoch"):
        last = order.count_steps() - 1
        order.documents_of_step(last - 64)
    slowest = 0.0
    for step in range(last - 63, last + 65):
        with _timed(seconds, "step"):
            order.documents_of_step(step)
        slowest = max(slowest, seconds.pop("step"))
    seconds["slowest step around the border"] = slowest
    return order


def _planning(folder: Path, seconds: dict[str, float]) -> StepOrder:
    with _timed(seconds, "load"):
        order: StepOrder = pickle.loads((folder / "order.pickle").read_bytes())
    with _timed(seconds, "first step"):
        order.documents_of_step(0)
    return order


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The rise of own memory and of files' until the block ends, and the own memory before it."""
    before = _own_and_files()
    rise = [0, 0, before[0]]

    def sample() -> None:
        for kind, now in enumerate(_own_and_files()):
            rise[kind] = max(rise[kind], now - before[kind])

    with sampled(sample, every=0.002):
        yield rise


def _own_and_files() -> tuple[int, int]:
    """Bytes of memory of this process that are resident: its own, and of files."""
    now = resident()
    return now["RssAnon"], now["RssFile"]


def _markdown(record: dict[str, Any]) -> Iterator[str]:
    yield "# The order of documents: memory of a rank and seconds"
    yield ""
    yield origin_text(record)
    yield ""
    yield "| rows | case | documents | peak own MB | peak MB of files | held own MB | seconds | largest objects held |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in record["rows"]:
        memory = (f"{row[name] / 1e6:,.0f}" for name in ("peak_own", "peak_files", "held_own"))
        seconds = ", ".join(f"{name} {value:.4g}" for name, value in row["seconds"].items())
        cells = [row["label"], row["case"], f"{row['documents']:,}", *memory, seconds, "; ".join(row["objects"])]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

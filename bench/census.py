"""The census: every causal language model class of transformers, and variants, exact beside the stock model or refused.

With `--classes image-text-to-text` those from images and text to text, with images.

    python bench/census.py --out bench/records/census.json                        # goes on where it was ended
    python bench/census.py --only qwen3 gemma3_text+linear                        # some, without a record
    python bench/census.py --out bench/records/census.json --redo outdated        # those of another commit again
    python bench/census.py --out now.json --compare bench/records/census.json     # what got better, what worse
    python bench/census.py --docs docs/models.md                                  # the page, from the records alone

Small copies in float64 on the CPU, each on three processes (`longspan doctor --model CLASS` does the same for one).
Exits with 1 where a model is wrong or crashed, or where something is worse than in the record of --compare.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.census.images import image_names, image_row_of, image_text
from bench.census.models import names
from bench.census.page import page
from bench.census.record import as_text, changes, failed
from bench.census.run import row_of  # at the top, so that the fork server of the ranks has its imports

from longspan.bench.benches import write_record
from longspan.cli.machine import machine_facts
from longspan.versions import versions

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "bench" / "records" / "census.json"
RECORD_OF_IMAGES = RECORD.with_stem("census-images")


class Classes(NamedTuple):
    """Which classes of transformers: their names, what makes a row of the record, and the record as text."""

    names: Callable[[], list[str]]
    row_of: Callable[[str], dict[str, Any]]
    as_text: Callable[[Mapping[str, Any]], str]
    record: Path


CLASSES = {
    "text": Classes(names, row_of, as_text, RECORD),
    "image-text-to-text": Classes(image_names, image_row_of, image_text, RECORD_OF_IMAGES),
}


def main() -> int:
    options = _parser().parse_args()
    if options.docs is not None:
        options.docs.write_text(page(_read(RECORD), _read(RECORD_OF_IMAGES)), encoding="utf-8")
        return 0
    record = run(options)
    bad = failed(record)
    worse = changes(_read(options.compare), record) if options.compare else []
    print("\n".join([*bad, *map(str, worse)]))
    return int(bool(bad) or any(change.worse for change in worse))


def run(options: argparse.Namespace) -> dict[str, Any]:
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    known = _read(options.out)["models"] if options.out and options.out.exists() else {}
    about = {"bench": "census", "machine": machine_facts(), "versions": versions(), "commit": commit}
    classes = CLASSES[options.classes]
    flag = "" if options.classes == "text" else f"--classes {options.classes} "
    command = f"python bench/census.py {flag}--out {classes.record.relative_to(ROOT)}"
    record: dict[str, Any] = {**about, "command": command, "models": dict(known)}
    order = dict(zip(there := classes.names(), range(10**6), strict=False))
    wanted = _chosen(options, there, known, commit)
    began = time.perf_counter()
    for number, (name, row) in enumerate(rows_of(classes.row_of, wanted, options.jobs), 1):
        print(f"{number} of {len(wanted)}, {time.perf_counter() - began:.0f} s: {_line(name, row)}", flush=True)
        if options.out and options.out.exists():  # other calls may add to it
            record["models"] = _read(options.out)["models"]
        record["models"][name] = row | {"commit": commit, "transformers": about["versions"]["transformers"]}
        record["models"] = dict(sorted(record["models"].items(), key=lambda item: order.get(item[0], len(order))))
        if options.out:
            write_record(record, options.out, classes.as_text(record))
    return record


def _chosen(options: argparse.Namespace, there: Sequence[str], known: dict[str, Any], commit: str) -> list[str]:
    if unknown := [name for name in options.only if name not in there]:
        raise SystemExit(f"no model of the census is called {', '.join(unknown)}; some are {', '.join(there[:8])}, …")
    redone = {"none": (), "outdated": [n for n in known if known[n]["commit"] != commit], "all": list(known)}
    return [n for n in options.only or there if n not in known or n in redone[options.redo]]


def rows_of(
    row_of: Callable[[str], dict[str, Any]], names: Sequence[str], jobs: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows, so many at a time, each made in a process of its own kind: one that dies is a crash of its models."""
    left = list(names)
    while left:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(row_of, name): name for name in left[:jobs]}
            waiting = left[jobs:]
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    name = running.pop(future)
                    left.remove(name)
                    if (error := future.exception()) is None:
                        yield name, future.result()
                        continue
                    row = {"class": "", "heads": [], "ways": {}, "case": "", "parameter": "", "seconds": 0.0}
                    row |= {"status": "crashed", "message": f"{type(error).__name__}: {error}"}
                    yield name, row | {"loss_error": None, "gradient_error": None}
                if any(isinstance(future.exception(), BrokenProcessPool) for future in done):
                    break
                running |= {pool.submit(row_of, name): name for name in waiting[: len(done)]}
                waiting = waiting[len(done) :]


def _line(name: str, row: dict[str, Any]) -> str:
    ways = "".join(f", {way} {cell['status']}" for way, cell in row["ways"].items())
    errors = f" {row['loss_error']:.0e} {row['gradient_error']:.0e}" if row.get("gradient_error") is not None else ""
    return f"{name} {row['status']}{errors}{ways} ({row['seconds']} s) {row['message'][:160]}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the record, JSON; what it has already is not run again")
    parser.add_argument("--classes", choices=tuple(CLASSES), default="text")
    parser.add_argument("--only", nargs="+", default=[], help="these models, in this order")
    parser.add_argument("--redo", choices=("none", "outdated", "all"), default="none")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--compare", type=Path, help="another record")
    parser.add_argument("--docs", type=Path, help="write the page of models from the record, and run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())

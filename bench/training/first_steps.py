"""Seconds of the first steps of `longspan train`, with an empty cache of compiled kernels and with the one it leaves.

python bench/training/first_steps.py --ranks 2 --longest 256 --tail 256 --steps 6 --out record.json  # on CPUs, tiny
python bench/training/first_steps.py --ranks 4 --out bench/records/first-steps.json -- --model.preset qwen3-8b

Every step holds one document of `--longest` tokens and a long tail of `--tail` tokens. What follows `--` are flags of
`longspan train`. Runs are ended after `--steps` steps. Among --runs, `bench` is `longspan bench step` on the documents
of a step, with the same flags.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from bench.begun import open_record
from bench.processes.end_processes import end_with_workers
from tokenizers import Tokenizer, models, pre_tokenizers

from longspan.bench.benches import origin_text, write_record
from longspan.data.step_order import StepOrder
from longspan.plain_text import markdown_table
from longspan.plan.distributions import sample_lengths

WORDS = 256  # of the tokenizer: the numbers below
SEED = 0
WARM_UP = re.compile(r"kernels compiled and memory found in ([\d.]+) s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--tail", type=int, default=131072, help="tokens of the other documents of a step")
    parser.add_argument("--tail_longest", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--runs", default="cold,warm,bench", help="runs, one after another over one cache of kernels")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds of a run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="flags of longspan train")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # a run that is under way ends too
    steps = [[options.longest, *_tail(options)]] * options.steps
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    about = {name: getattr(options, name) for name in ("ranks", "longest", "tail", "tail_longest", "flags")}
    record = open_record("first steps", None, backend, Path(__file__).parent) | about
    record |= {"lengths": steps[0], "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        data = write_texts(Path(folder), steps)
        for number, name in enumerate(options.runs.split(",")):
            run = Path(folder) / f"run{number}"
            words = command_of(options, data, run, sum(steps[0]))
            row = {"run": name} | (bench(options, steps[0], run) if name == "bench" else timed(words, options, run))
            print(f"{name}: {json.dumps(row)}", flush=True)
            record["rows"].append(row)
            write_record(record, options.out, as_markdown(record))


def _tail(options: argparse.Namespace) -> list[int]:
    """Log-normal lengths of so many tokens together."""
    if not options.tail:
        return []
    longest = min(options.tail_longest, options.tail)
    *lengths, last = sample_lengths("lognorm", options.tail, seed=SEED, longest=longest).tolist()
    rest = last - (sum(lengths) + last - options.tail)
    if rest < 2 and lengths:  # a document has two tokens at least
        lengths[0] += rest
        return lengths
    return [*lengths, rest]


def write_texts(folder: Path, steps: list[list[int]]) -> Path:
    """A file of texts that give these lengths in the order in which a run takes them, and their tokenizer."""
    lengths = [n for step in steps for n in step]
    order = StepOrder(lengths, tokens_per_step=sum(lengths), seed=SEED, eval_documents=0).documents_of_step(0)
    placed = dict(zip(order, lengths, strict=True))
    draw = np.random.default_rng(SEED)
    with (folder / "texts.jsonl").open("w") as file:
        for document in range(len(lengths)):
            numbers = draw.integers(0, WORDS, placed[document]).tolist()
            file.write(json.dumps({"text": " ".join(map(str, numbers))}) + "\n")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def plan_flags(options: argparse.Namespace) -> dict[str, object]:
    return {
        "context.max_tokens_per_slot": -(-options.longest // options.ranks),
        "context.planner": "dynamic",
        "context.cp_comm_type": "auto",
    }


def command_of(options: argparse.Namespace, data: Path, run: Path, tokens: int) -> list[str]:
    flags = {
        "data.path": data / "texts.jsonl",
        "data.tokenizer": data,
        "data.max_document_tokens": 0,
        "evaluation.documents": 0,
        "train.tokens_per_step": tokens,
        "train.steps": 100 * options.steps,  # the run is ended before
        "optimizer.lr": 1e-5,
        "train.seed": SEED,
        "run.dir": run,
    }
    return _longspan(options, ["train"], plan_flags(options) | flags, options.flags)


def _longspan(options: argparse.Namespace, verb: list[str], ours: dict[str, object], theirs: list[str]) -> list[str]:
    words = [word for name, value in ours.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "longspan", *verb, "--world", str(options.ranks), *words, *theirs]


def bench(options: argparse.Namespace, lengths: list[int], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "lengths.json").write_text(json.dumps(lengths))
    pairs = zip(options.flags[::2], options.flags[1::2], strict=True)
    theirs = [w for pair in pairs if not pair[0].startswith(("--data.", "--run.")) for w in pair]
    planner = dict(zip(theirs[::2], theirs[1::2], strict=True)).get("--context.planner", "dynamic")
    ours = {"lengths": folder / "lengths.json", "planners": planner, "out": folder / "record.json"}
    command = _longspan(options, ["bench", "step"], plan_flags(options) | ours, theirs)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=options.timeout)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    (row,) = json.loads((folder / "record.json").read_text())["rows"]
    return {
        "steady_seconds": row["seconds"],
        "tokens_per_second": round(sum(lengths) / row["seconds"], 1),
        "bench": row,
    }


def timed(words: list[str], options: argparse.Namespace, run: Path) -> dict[str, Any]:
    started = time.time()
    lines = run.with_suffix(".txt")
    with lines.open("w") as out:
        cache = os.environ | {"XDG_CACHE_HOME": str(run.parent / "cache")}  # of kernels
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=cache)
        try:
            rows, line, first, last = _watched(process, run / "metrics.jsonl", lines, options, started)
        finally:
            end_with_workers(process, str(run))
    text = lines.read_text(errors="replace")
    if len(rows) < options.steps:
        raise SystemExit(f"the run ended after {len(rows)} steps:\n{text[-4000:]}")
    seconds = [row["seconds"] for row in rows]
    warm_up = WARM_UP.search(text)
    steady = statistics.median(seconds[len(seconds) // 2 :])
    return {
        "seconds": seconds,
        "seconds_between_steps": round((last - first) / (len(rows) - 1), 3),
        "warm_up_seconds": float(warm_up[1]) if warm_up else None,
        "seconds_to_first_line": round(line - started, 1),
        "seconds_to_first_step": round(first - started, 1),
        "steady_seconds": steady,
        "worst_ratio": round(max(seconds[1:]) / steady, 3),
        "first_ratio": round(seconds[0] / steady, 3),
        "tokens_per_second": round(rows[-1]["tokens"] / steady, 1),
        "memory_bytes": rows[-1]["memory_bytes"],
        "starts": json.loads((run / "run.json").read_text()).get("starts", {}),
    }


def _watched(
    process: subprocess.Popen[bytes], file: Path, printed: Path, options: argparse.Namespace, started: float
) -> tuple[list[dict[str, Any]], float, float, float]:
    """The rows of steps as they come, until there are enough or the run has ended.

    Also when the first line was printed, and when the first row and the last came.
    """
    rows = list[dict[str, Any]]()
    first_line = 0.0
    first = 0.0
    while len(rows) < options.steps and time.time() - started < options.timeout:
        ended = process.poll() is not None
        lines = file.read_text().splitlines() if file.is_file() else []
        rows = [row for row in map(json.loads, (line for line in lines if line.endswith("}"))) if "loss" in row]
        first_line = first_line or (time.time() if printed.stat().st_size else 0.0)
        first = first or (time.time() if rows else 0.0)
        if ended:
            break
        time.sleep(0.05)
    return rows[: options.steps], first_line, first, time.time()


def as_markdown(record: dict[str, Any]) -> str:
    names = ("run", "warm-up", "steps, seconds", "steady", "worst from the second", "first", "tokens/s")
    names += ("to the first line", "to step 1")
    rows = [
        (
            row["run"],
            f"{row['warm_up_seconds']:.1f} s" if row.get("warm_up_seconds") is not None else "none",
            " ".join(f"{s:.2f}" for s in row.get("seconds", ())),
            f"{row['steady_seconds']:.3f} s",
            *(f"{row[name]:.2f}" if name in row else "" for name in ("worst_ratio", "first_ratio")),
            f"{row['tokens_per_second']:,.0f}",
            *(
                f"{row[name]:.1f} s" if name in row else ""
                for name in ("seconds_to_first_line", "seconds_to_first_step")
            ),
        )
        for row in record["rows"]
    ]
    return (
        f"# The first steps of `longspan train` on {record['ranks']} ranks ({record['backend']})\n\n"
        f"Each step holds one document of {record['longest']:,} tokens and a long tail of {record['tail']:,}. "
        "Ratios are of the steady step, the median of the second half; `bench` is `longspan bench step` on the same "
        "documents.\n\n"
        f"{origin_text(record)}\n\n{markdown_table(names, rows)}\n{_starts_table(record)}"
    )


def _starts_table(record: dict[str, Any]) -> str:
    starts = [(row["run"], row["starts"]) for row in record["rows"] if row.get("starts")]
    if not starts:
        return ""
    parts = list(dict.fromkeys(name for _, seconds in starts for name in seconds))
    rows = [(run, *(f"{seconds[part]:.1f} s" if part in seconds else "" for part in parts)) for run, seconds in starts]
    return (
        f"\nThe first rank's start, from the command to the end of step 1:\n\n{markdown_table(('run', *parts), rows)}\n"
    )


if __name__ == "__main__":
    main()

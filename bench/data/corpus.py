"""A corpus from files to rows: tokens a second, memory of the processes that tokenize, and of ranks that open it.

python bench/data/corpus.py --megabytes 2000 --workers 2 --out bench/records/corpus.json

A .jsonl of made text is written: words whose frequencies fall as those of a language do, numbers, punctuation, and
documents of lognormal lengths; equal arguments write an equal file. Each case runs in fresh processes, which have
imported everything before they are measured: `build` makes the corpus as the first rank of a run does, `again` is the
same call with nothing changed, `other run` that of a second run with the same cache, and `open` is what each rank does:
it opens the corpus, makes the order, and reads the rows of its first step. Memory is anonymous, which is a process's
own; a peak is of all that was resident, with imports and mapped files.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from bench.begun import open_record
from process_memory import resident, sampled

from longspan.bench.record import origin_text, write_record
from longspan.config.sections import DataConfig
from longspan.corpus.build import ensure_corpus
from longspan.corpus.corpus_settings import CorpusSettings
from longspan.corpus.tokenizer import load_tokenizer, train_tokenizer
from longspan.data.documents import Corpus
from longspan.data.step_order import StepOrder

SEED, WORDS, TOKENS_PER_STEP, HELD_OUT = 0, 400_000, 65_536, 32
SAMPLE_BYTES = 8_000_000  # of the file, for a tokenizer that is trained
BATCH = 1 << 20  # words that are drawn together
SYLLABLES = list("aeiou") + [c + v for c in "bdfghklmnprstvwz" for v in ("a", "e", "i", "o", "an", "er", "ing")]
MARKS = np.array(
    [". ", ", ", "\n", "; ", " (", ") ", ": ", "\n\n", " = ", "_", "für ", "日本", "Привет "], dtype=object
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json; left out: one is trained")
    parser.add_argument("--vocabulary", type=int, default=32_768, help="of the tokenizer that is trained")
    parser.add_argument("--folder", type=Path, help="where the corpus lies meanwhile; left out: a temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(CASES[options.case](options)))
        return
    record = open_record("corpus", None, "none", Path(__file__).parent)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = Path(folder)
        record |= measured(options)
    print(text := "\n".join(_markdown(record)) + "\n")
    if options.out:
        write_record(record, options.out, text)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """What every case took."""
    start = time.perf_counter()
    documents = write_text(options.folder / "text.jsonl", options.megabytes * 1_000_000)
    size = (options.folder / "text.jsonl").stat().st_size
    made = {"bytes": size, "rows": documents, "seconds": time.perf_counter() - start}
    if options.tokenizer is None:
        options.tokenizer = options.folder / "tokenizer"
        options.tokenizer.mkdir()
        train_tokenizer(_sample(options.folder), options.vocabulary).save_pretrained(options.tokenizer)
    rows = {"workers": options.workers, "cores": len(os.sched_getaffinity(0)), "file": made}
    for case in ("build", "again", "other run"):
        (rows[case],) = _run(case, options, 1)
        print(case, rows[case], flush=True)
    files = [path for path in (options.folder / "cache").rglob("*") if path.is_file()]
    rows["cache_bytes"] = sum(path.stat().st_size for path in files)
    rows["ranks"] = _run("open", options, options.ranks)
    return rows


def write_text(path: Path, size: int) -> int:
    """Write documents of at least `size` bytes in all; how many there are."""
    draw = np.random.default_rng(SEED)
    parts = [np.array(SYLLABLES, dtype=object)[draw.integers(0, len(SYLLABLES), WORDS)] for _ in range(4)]
    lengths = draw.integers(1, 5, WORDS)
    words = np.array([" " + "".join(w[:n]) for *w, n in zip(*parts, lengths, strict=True)], dtype=object)
    words[::7] = [word.title() for word in words[::7]]
    frequencies = 1 / (np.arange(WORDS) + 2.7)
    edges = np.cumsum(frequencies / frequencies.sum())
    documents, written, waiting, wanted = 0, 0, list[str](), 0
    with path.open("wb") as file:
        while written < size:
            drawn = words[np.minimum(np.searchsorted(edges, draw.random(BATCH)), WORDS - 1)]
            marks = draw.random(BATCH) < 0.12
            drawn[marks] = MARKS[draw.integers(0, len(MARKS), int(marks.sum()))]
            numbers = draw.random(BATCH) < 0.02
            drawn[numbers] = [f" {n}" for n in draw.integers(0, 10**6, int(numbers.sum())).tolist()]
            waiting += drawn.tolist()
            at = 0
            while written < size and wanted <= len(waiting) - at:
                if wanted:
                    line = json.dumps({"text": "".join(waiting[at : at + wanted])}, ensure_ascii=False) + "\n"
                    written, documents, at = written + file.write(line.encode()), documents + 1, at + wanted
                wanted = int(np.clip(draw.lognormal(6.5, 1.3), 4, 500_000))
            del waiting[:at]
    return documents


def _sample(folder: Path) -> Iterator[str]:
    with (folder / "text.jsonl").open(encoding="utf-8") as file:
        read = 0
        for line in file:
            yield json.loads(line)["text"]
            if (read := read + len(line)) > SAMPLE_BYTES:
                return


def _run(case: str, options: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """The answers of so many processes that do the same at once."""
    command = [sys.executable, __file__, "--case", case, "--workers", str(options.workers)]
    command += ["--folder", str(options.folder), "--tokenizer", str(options.tokenizer)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    answers = [process.communicate()[0] for process in processes]
    if failed := [process.returncode for process in processes if process.returncode]:
        raise SystemExit(f"case {case!r} ended with status {failed[0]}")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def _ensured(options: argparse.Namespace, run: str = "run") -> dict[str, Any]:
    """One start of a run: what it took, and what the call said."""
    data = DataConfig(
        path=str(options.folder / "text.jsonl"),
        cache=str(options.folder / "cache"),
        workers=options.workers,
        max_document_tokens=0,
    )
    tokenizer, said = load_tokenizer(options.tokenizer), list[str]()
    with _peaks() as peaks:
        start, anonymous = time.perf_counter(), resident()["RssAnon"]
        corpus = ensure_corpus(
            CorpusSettings(data), options.folder / run, tokenizer=tokenizer, resumed=False, log=said.append
        )
        seconds = time.perf_counter() - start
    answer = {"seconds": seconds, "anonymous_before": anonymous, **peaks}
    answer |= {"documents": len(corpus), "tokens": corpus.manifest.tokens}
    rates = [int(rate.replace(",", "")) for line in said for rate in re.findall(r"([\d,]+) a second", line)]
    if rates:
        answer |= {"tokens_per_second": rates[-1]}
        answer |= {"bytes_per_second": rates[-1] * corpus.sources[0].bytes / corpus.manifest.tokens}
    return answer


def _other_run(options: argparse.Namespace) -> dict[str, Any]:
    return _ensured(options, "second")


def _open(options: argparse.Namespace) -> dict[str, Any]:
    """What a rank does before its first step."""
    torch.zeros(1)
    answer = dict[str, Any]()
    before = answer["anonymous_before"] = resident()["RssAnon"]

    def note(name: str, start: float) -> None:
        answer[f"{name}_seconds"] = time.perf_counter() - start
        answer[f"{name}_anonymous"] = resident()["RssAnon"] - before

    start = time.perf_counter()
    corpus = Corpus(options.folder / "run" / "corpus")
    note("open", start)
    start = time.perf_counter()
    order = StepOrder(
        corpus.lengths, tokens_per_step=TOKENS_PER_STEP, seed=SEED, eval_documents=HELD_OUT, targets=corpus.targets
    )
    documents = order.documents_of_step(0)
    note("order", start)
    start = time.perf_counter()
    rows = [corpus[document][np.arange(int(corpus.lengths[document]))] for document in documents]
    note("rows", start)
    return answer | {"documents": len(rows), "tokens": sum(map(len, rows))}


CASES = {"build": _ensured, "again": _ensured, "other run": _other_run, "open": _open}


@contextmanager
def _peaks() -> Iterator[dict[str, int]]:
    """The peak of this process until the block ends, and of the largest of its children: all resident, and its own."""
    peaks = {"peak": 0, "peak_anonymous": 0, "worker_peak": 0, "worker_peak_anonymous": 0}

    def note(pid: int, whole: str) -> None:
        now = resident(pid)
        peaks[whole] = max(peaks[whole], now.get("VmHWM", 0), now.get("VmRSS", 0))
        peaks[f"{whole}_anonymous"] = max(peaks[f"{whole}_anonymous"], now.get("RssAnon", 0))

    def sample() -> None:
        note(os.getpid(), "peak")
        for child in _children():
            note(child, "worker_peak")

    try:
        with sampled(sample, every=0.1):
            yield peaks
    finally:
        note(os.getpid(), "peak")


def _children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in path.read_text(encoding="ascii").split()]


def _markdown(record: dict[str, Any]) -> Iterator[str]:
    build, file = record["build"], record["file"]
    yield "# A corpus: tokenizing, starting again, and opening"
    yield ""
    yield origin_text(record)
    yield ""
    yield (
        f"{file['bytes'] / 1e6:,.0f} MB in {file['rows']:,} rows of made text, {build['tokens']:,} tokens; "
        f"{record['workers']} processes tokenize on {record['cores']} cores."
    )
    yield ""
    yield "| what | figure |"
    yield "| --- | --- |"
    yield f"| tokenizing | {build['tokens_per_second']:,} tokens/s, {build['bytes_per_second'] / 1e6:.2f} MB/s |"
    yield f"| first start, with sums of the file | {build['seconds']:.1f} s |"
    yield f"| building process, peak | {_megabytes(build, 'peak')} |"
    workers = _megabytes(build, "worker_peak") if build["worker_peak"] else "the building process: it is little"
    yield f"| largest process that tokenizes, peak | {workers} |"
    cache = record["cache_bytes"]
    yield f"| cache | {cache / 1e6:,.1f} MB, {cache / build['tokens']:.2f} bytes a token |"
    for case, name in (("again", "second start, nothing changed"), ("other run", "first start of another run")):
        yield f"| {name} | {record[case]['seconds']:.2f} s, peak {_megabytes(record[case], 'peak')} |"
    for number, rank in enumerate(record["ranks"]):
        before = rank["anonymous_before"] / 1e6
        for name, text in (("open", "opens"), ("order", "makes its order"), ("rows", "reads its first step's rows")):
            after = rank[f"{name}_anonymous"] / 1e6
            more = f", {rank['tokens']:,} tokens" * (name == "rows")
            yield f"| rank {number} {text} | {rank[f'{name}_seconds']:.3f} s, {before:,.0f} MB + {after:,.1f}{more} |"


def _megabytes(row: dict[str, Any], name: str) -> str:
    return f"{row[name] / 1e6:,.0f} MB, {row[f'{name}_anonymous'] / 1e6:,.0f} of them its own"


if __name__ == "__main__":
    main()

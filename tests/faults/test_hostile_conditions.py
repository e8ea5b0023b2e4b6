"""Commands under signals, full disks and outputs, few descriptors, no permission, huge files and wrong clocks.

Each ends with what it was asked for, or with an error in words; nothing of it is left, neither processes nor files.
"""

import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longspan.cli.main import main
from longspan.config.file import to_toml
from longspan.files import read_json
from tests.corpus.test_formats import zstd
from tests.faults.commands import VERBS, Command, Ended, leftovers, run_command
from tests.run.runs.homes import ALONE
from tests.train.small import small_config, train_rank, write_model

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
SEED = int(os.environ.get("LONGSPAN_TEST_SEED", time.time_ns() % 1_000_000))
BOMB = 2 << 30  # bytes, of which a process holds fewer than MOST_BYTES
MOST_BYTES = 1500 << 20
MIB = 1 << 20
MEASURE = [
    sys.executable,
    "-c",
    """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
open("peak", "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
""",
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with config.toml, texts, model and run."""
    write_model(tmp_path)
    keys: dict[str, Any] = {"model__path": str(tmp_path / "model"), "train__steps": 2, "checkpoint__every": 1}
    config = small_config(tmp_path, **keys, evaluation__every=0, evaluation__documents=2, **ALONE)
    train_rank(0, config, 1)
    (tmp_path / "config.toml").write_text(to_toml(config))
    return tmp_path


def refused(ended: Ended, *messages: str) -> None:
    """One error in words, where one of these messages is in it."""
    assert ended.status == 2 and "Traceback" not in ended.error, ended
    assert any(message in ended.error for message in messages), ended.error


INTERRUPTIONS = {"train": 5, "eval": 3, "generate": 3, "export": 3, "report": 3, "plan": 3, "show": 3}


@pytest.mark.parametrize("verb", INTERRUPTIONS)
def test_an_interrupted_command_leaves_nothing(verb: str, place: Path) -> None:
    print("seed", SEED)
    draw = random.Random(f"{SEED} {verb}")
    words = VERBS[verb]
    if verb == "train":
        shutil.rmtree(place / "run")
    whole = run_command(place, words)
    assert whole.status == 0, whole
    for _ in range(INTERRUPTIONS[verb]):
        remove_results(verb, place)
        command = Command(place, words)
        command.wait_for_handlers()
        time.sleep(draw.random() * whole.seconds)
        number, send = draw.choice([signal.SIGINT, signal.SIGTERM]), draw.choice([os.kill, os.killpg])
        if command.process.poll() is None:
            send(command.process.pid, number)
        ended = command.end()
        # A run that is at work saves and ends with status 0; a command that was about to end has ended.
        # By the signal itself as the interpreter ends, which a shell shows as 128 + its number.
        assert ended.status in (0, 128 + number, -number) and "Traceback" not in ended.error, ended
    again = run_command(place, words)
    assert again.status == 0 and not leftovers(place), (again, leftovers(place))


def remove_out(place: Path) -> None:
    shutil.rmtree(place / "out", ignore_errors=True)


def remove_results(verb: str, place: Path) -> None:
    remove_out(place)
    if verb == "train":
        shutil.rmtree(place / "run", ignore_errors=True)
        shutil.rmtree(place / "cache", ignore_errors=True)


@pytest.mark.parametrize("verb", VERBS)
def test_full_and_closed_outputs(verb: str, place: Path) -> None:
    words = VERBS[verb]
    with Path("/dev/full").open("wb") as full:
        ended = run_command(place, words, stdout=full)
        if verb == "train":
            assert ended.status == 0 and "No space left on device" in (place / "run/output.txt").read_text(), ended
        else:
            refused(ended, "standard output does not take the result (No space left on device)")
        remove_out(place)
        ended = run_command(place, words, stderr=full)
        assert ended.status == 0, ended
        assert run_command(place, [words[0], "--no-such-flag"], stderr=full, stdout=full).status == 2
    remove_out(place)
    reader, writer = os.pipe()
    command = Command(place, words, stdout=writer)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    ended = command.end()
    assert ended.status == 0 and "Traceback" not in ended.error, ended


def limited(kind: int, most: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(kind, (most, most))

    return limit


FULL = ("File too large", "too large", "No space left")


@pytest.mark.parametrize(
    ("verb", "sizes"), [("train", (3_000, 60_000, 2_000_000)), ("export", (3_000, 60_000)), ("report", (3_000,))]
)
def test_files_that_a_disk_does_not_take(verb: str, sizes: Sequence[int], place: Path) -> None:
    """One try goes on from what the one before it left, and the last one, with room, ends well."""
    remove_results(verb, place)
    for size in sizes:
        refused(run_command(place, VERBS[verb], setup=limited(resource.RLIMIT_FSIZE, size)), *FULL)
        assert not leftovers(place), leftovers(place)
    again = run_command(place, VERBS[verb])
    assert again.status == 0 and not leftovers(place), (again, leftovers(place))


@pytest.fixture
def disk(place: Path) -> Iterator[Path]:
    """A file system of its own, of 64 KiB; without the right to mount one, a limit of the size of files stands for it
    (`test_files_that_a_disk_does_not_take`).
    """
    folder = place / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def test_a_small_disk(disk: Path, place: Path) -> None:
    """What is written to it is refused until it has room, and then it is written."""
    train = [*VERBS["train"], "--run.dir", "disk/run"]
    refused(run_command(place, train), "KiB free, for 0 of 2 more checkpoints at once")
    for size in ("64k", "1m", "8m"):
        resize(disk, size)
        refused(run_command(place, [*train, "--checkpoint.allow_little_disk", "true"]), *FULL)
        assert not leftovers(place), leftovers(place)
    resize(disk, "64m")
    assert run_command(place, train).status == 0
    used = sum(path.stat().st_blocks for path in disk.rglob("*")) // 2
    resize(disk, f"{used + 8}k")
    for words in (["report", "disk/run"], ["export", "disk/run", "disk/out"]):
        refused(run_command(place, words), *FULL)
        assert not leftovers(place), leftovers(place)
    resize(disk, "64m")
    for words in (["report", "disk/run"], ["export", "disk/run", "disk/out"]):
        ended = run_command(place, words)
        assert ended.status == 0 and not leftovers(place), (ended, leftovers(place))


def test_sixty_four_descriptors(place: Path) -> None:
    for verb in ("train", "eval", "generate", "export", "report"):
        ended = run_command(place, VERBS[verb], setup=limited(resource.RLIMIT_NOFILE, 64))
        assert ended.status in (0, 2) and "Traceback" not in ended.error, (verb, ended)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may become somebody else")
def test_no_permission(place: Path) -> None:
    for path in (place, *place.parents[:3]):
        path.chmod(0o755)
    for verb in ("train", "eval", "generate", "export", "report"):
        (place / "tmp").mkdir(exist_ok=True)
        (place / "tmp").chmod(0o777)
        ended = run_command(place, VERBS[verb], setup=lambda: os.setuid(65534))
        if verb in ("eval", "generate"):  # the corpus, which the first may not read, is in a cache
            assert ended.status in (0, 2) and "Traceback" not in ended.error, (verb, ended)
        else:
            refused(ended, "Permission denied", "cannot be written")
    (place / "run/checkpoints/step-000002").chmod(0)
    for verb in ("eval", "generate", "export"):
        ended = run_command(place, VERBS[verb], setup=lambda: os.setuid(65534))
        assert ended.status in (0, 2) and "Traceback" not in ended.error, (verb, ended)


def corpus_words(data: Path, *more: str) -> list[str]:
    words = ["train", "--model.path", "model", "--data.path", str(data), "--world", "1", "--device", "cpu"]
    words += ["--run.dir", "new", "--train.steps", "1", "--train.tokens_per_step", "128", "--optimizer.lr", "1e-5"]
    words += ["--data.max_document_tokens", "64", "--context.max_tokens_per_slot", "64"]
    return [*words, "--evaluation.documents", "0", *more]


def test_a_million_rows(place: Path) -> None:
    data = place / "rows.jsonl"
    data.write_text("".join(f'{{"text": "def {i}"}}\n' for i in range(1_000_000)))
    shown = run_command(place, corpus_words(data, "--show", "1"))
    assert shown.status == 0 and shown.seconds < 60, shown
    ended = Command(place, corpus_words(data)).end(600)
    assert ended.status == 0, ended
    assert read_json(place / "new/corpus/corpus.json"), ended


def test_rows_of_50_million_bytes(place: Path) -> None:
    data = place / "rows.jsonl"
    long = json.dumps({"text": "def class " * 5_000_000})
    data.write_text(f'{long}\n{{"text": "def class"}}\n')
    ended = Command(place, corpus_words(data)).end(600)
    assert ended.status == 0, ended


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.jsonl.zst", "bomb.json.gz"])
def test_bombs_unpack_within_memory(name: str, place: Path) -> None:
    data = place / name
    write_bomb(data)
    for more in ([], ["--data.on_bad_row", "skip"]):
        ended = Command(place, corpus_words(data, *more), MEASURE).end(600)
        peak = int((place / "peak").read_text()) << 10
        assert peak < MOST_BYTES, (peak, ended)
        refused(ended, "data.max_text_bytes" if not more else "is empty: of 1 file")


def write_bomb(path: Path) -> None:
    piece = b"a" * (16 * MIB)
    head, tail = (b'[{"text": "', b'"}]\n') if ".json." in path.name else (b'{"text": "', b'"}\n')
    if path.suffix == ".zst":
        path.write_bytes(zstd(head) + zstd(piece) * (BOMB // len(piece)) + zstd(tail))
        return
    # Members of a file follow one another, so that one piece is compressed once.
    path.write_bytes(gzip.compress(head) + gzip.compress(piece, 1) * (BOMB // len(piece)) + gzip.compress(tail))


BACKWARDS = """
import itertools, time
now, count = time.time, itertools.count()
time.time = lambda: now() - 3600 * next(count)
"""


def test_clocks_that_go_backwards(place: Path) -> None:
    """Of files that are dated ahead, and of the process, whose clock goes back by an hour with each question."""
    ahead = time.time() + 10 * 365 * 86400
    for path in place.rglob("*"):
        os.utime(path, (ahead, ahead))
    for verb in ("report", "export", "eval"):
        ended = run_command(place, VERBS[verb])
        assert ended.status == 0, (verb, ended)
    (place / "sitecustomize.py").write_text(BACKWARDS)
    shutil.rmtree(place / "run")
    prefix = ["env", f"PYTHONPATH={place}:{os.environ.get('PYTHONPATH', '')}"]
    for verb in ("train", "report"):
        ended = Command(place, VERBS[verb], prefix).end()
        assert ended.status == 0, (verb, ended)
    assert not leftovers(place)


ODD_NAMES = ("step-\u00b2", "step-", "step--00001", "step-1e3", f"step-{10**20}", "\x1b[2J", " ", "step-000009 ")


def test_odd_names_among_checkpoints(place: Path) -> None:
    for name in ODD_NAMES:
        (place / "run/checkpoints" / name).mkdir()
    (place / "run/checkpoints/step-000007").write_text("a file")
    os.mkfifo(place / "run/checkpoints/step-000008")
    (place / "run/checkpoints/step-000010").symlink_to("step-000008")
    Path(os.fsdecode(bytes(place / "run/checkpoints") + b"/step-\xff")).mkdir()
    for verb in ("export", "report", "eval", "train"):
        ended = run_command(place, VERBS[verb])
        assert ended.status == 0 and "\x1b" not in ended.output + ended.error, (verb, ended)


VALUES: tuple[Any, ...] = (None, -1, 0, 1, 7, 1e300, "x", True, [], {})


def test_a_configuration_that_is_damaged_by_value(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It makes the same model as before, or another, or an error in words; export makes it without weights."""
    print("seed", SEED)
    draw = random.Random(f"{SEED} values")
    file = place / "run/config.json"
    values = read_json(file)
    for key, value in draw.sample([(key, value) for key in values for value in VALUES], 120):
        remove_out(place)
        file.write_text(json.dumps(values | {key: value}))
        status = main(["export", str(place / "run"), str(place / "out")])
        error = capfd.readouterr().err
        assert status == 0 or (status == 2 and "run" in error), (key, value, error)

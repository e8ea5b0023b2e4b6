"""A soak: a run of dynamic plans under one fault after another, and the same run undisturbed. Needs Linux, no GPU.

    python bench/soak.py --steps 2000 --world 8 --out bench/records/soak.json   # two hours of two cores
    python bench/soak.py --steps 120 --other_worlds 0 --between 10,20 --out /tmp/soak.json
    python bench/soak.py --together --out bench/records/soak.json               # both runs at a time, on 16 cores
    python bench/soak.py --steps 60 --between 5,10 --faults kill_in_step,full_disk --out /tmp/soak.json
    python bench/soak.py --folder runs/soak --out bench/records/soak.json    # again after SIGTERM: goes on from there

Every 50 to 150 steps (--between) a fault is drawn: a rank killed in a step, in an evaluation or while it saves; a rank
stopped for 30 seconds or slowed down; SIGTERM, SIGUSR1 or SIGHUP; the newest checkpoint corrupted or cut; a disk that
is full (a small tmpfs, which needs root); a file of the corpus that is gone. After a fault that ends the run the same
command is started again. The last weights must have the bits of the undisturbed run's. A second, shorter run
(--other_worlds steps) has one rank fewer for a while, again and again: its weights are within 1e-6 of theirs.

The record has every fault, the exit status, the steps that were lost, the seconds until the next step, and what was
printed. The command fails where a status, the weights, a process, a descriptor or a `.partial` is not as it must be.

With --folder everything stays there, and the same command goes on with what is not done: SIGTERM kills the disturbed
run, which is one fault more in the record; a run undisturbed that had not ended begins anew.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from longspan.checkpoint.files import checkpoint_path, step_of
from longspan.cli.machine import machine_facts, machine_text
from longspan.run.loggers.metrics_log import read_metrics
from longspan.versions import versions

STOPPED, REFUSED, LOST = 75, 2, 3  # exit statuses
PAUSE = 30.0  # seconds for which a rank stands still
PATIENCE = 900.0  # seconds in which a run must take its next step or end
CONFIG = """
[model]
preset = "qwen3-tiny"
dtype = "float64"
[data]
path = "{texts}"
vocab_size = 300
max_document_tokens = 384
eval_documents = 8
[context]
planner = "dynamic"
max_tokens_per_slot = 128
cp_comm_type = "auto"
{evaluation}
eval_max_tokens_per_slot = 256
[train]
steps = {steps}
tokens_per_step = 512
{rates}
warmup_steps = 10
eval_every = 30
save_every = 25
[run]
dir = "{dir}"
stopped_status = {stopped}
keep_checkpoints = 3
log_every = 50
"""


class SoakError(Exception):
    """What must hold and does not."""


@dataclass
class Attempt:
    """One process of the run, from its start to its end."""

    process: subprocess.Popen[bytes]
    log: Path
    world: int

    def ranks(self) -> list[int]:
        """The processes that train, which the launcher's fork server has started."""
        servers = [pid for pid in _children(self.process.pid) if "forkserver" in _command(pid)]
        return [pid for server in servers for pid in _children(server)][: self.world]

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        """The exit status. Raises SoakError where the run does not end."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise SoakError(f"the run did not end within {PATIENCE:g} s:\n{self.text()[-2000:]}") from None


@dataclass
class Soak:
    """A run's folder, the draw of faults, and what happened so far."""

    folder: Path
    steps: int
    world: int
    draw: np.random.Generator
    rows: list[dict[str, Any]] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0  # of earlier commands, where this one goes on
    process: subprocess.Popen[bytes] | None = None  # that runs

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def done(self) -> int:
        """The last step in the metrics."""
        rows = read_metrics(self.run / "metrics.jsonl")
        return rows[-1]["step"] if rows else 0

    def saved(self) -> list[int]:
        """The steps of whole checkpoints."""
        return sorted(step_of(path) for path in (self.run / "checkpoints").glob("step-??????"))

    def unfinished(self) -> list[Path]:
        return list((self.run / "checkpoints").glob("*.partial"))

    @property
    def file(self) -> Path:
        """What is known of the soak, for a command that goes on with it."""
        return self.folder / "soak.json"

    def write(self) -> None:
        """Write what is known of the soak."""
        known = {name: getattr(self, name) for name in ("rows", "descriptors", "attempts", "seconds")}
        self.file.write_text(json.dumps(known | {"draw": self.draw.bit_generator.state}))

    def read(self) -> bool:
        """Go on with what an earlier command has written; False where there is none."""
        if not self.file.exists():
            return False
        known = json.loads(self.file.read_text())
        self.draw.bit_generator.state = known.pop("draw")
        for name, value in known.items():
            setattr(self, name, value)
        return True

    @contextmanager
    def start(self, world: int = 0) -> Iterator[Attempt]:
        """Start the run's command; what is left of its processes at the end is counted and killed."""
        world, self.attempts = world or self.world, self.attempts + 1
        log = self.folder / f"log-{self.attempts:03}.txt"
        words = [sys.executable, "-m", "longspan", "train", str(self.folder / "config.toml"), "--device", "cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*words, "--world", str(world)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self.process = process
        try:
            yield Attempt(process, log, world)
        finally:
            process.kill()
            process.wait()
            _wait_until_gone(process.pid)

    def wait_for(self, condition: Callable[[], Any], attempt: Attempt, every: float = 0.02) -> bool:
        """Wait for a condition; False where the run has ended before. Raises SoakError where nothing moves."""
        deadline, last = time.monotonic() + PATIENCE, self.done()
        while not condition():
            if attempt.process.poll() is not None:
                return False
            if (now := self.done()) != last:
                deadline, last = time.monotonic() + PATIENCE, now
            if time.monotonic() > deadline:
                raise SoakError(f"no step in {PATIENCE:g} s after step {last}:\n{attempt.text()[-2000:]}")
            time.sleep(every)
        return True

    def choose_rank(self, attempt: Attempt) -> tuple[int, int]:
        """A rank by chance, and its process."""
        pids = attempt.ranks()
        if len(pids) != attempt.world:
            raise SoakError(f"{len(pids)} processes of ranks are found where {attempt.world} were started")
        rank = int(self.draw.integers(len(pids)))
        return rank, pids[rank]

    def note_descriptors(self, attempt: Attempt) -> None:
        """Count the open files of the rank that has most."""
        with suppress(OSError):
            self.descriptors.append(max(len([*Path(f"/proc/{pid}/fd").iterdir()]) for pid in attempt.ranks()))


# A fault acts on a running attempt; it returns what it did, and the exit status that must follow (None: it goes on).
Outcome = tuple[str, int | None]


def kill_in_step(soak: Soak, attempt: Attempt) -> Outcome:
    rank, pid = soak.choose_rank(attempt)
    os.kill(pid, signal.SIGKILL)
    return f"rank {rank} killed in a step", LOST


def kill_in_evaluation(soak: Soak, attempt: Attempt) -> Outcome:
    due = (soak.done() // 30 + 1) * 30
    soak.wait_for(lambda: soak.done() >= due, attempt, 0.005)
    rank, pid = soak.choose_rank(attempt)
    os.kill(pid, signal.SIGKILL)
    return f"rank {rank} killed in the evaluation after step {due}", LOST


def kill_in_save(soak: Soak, attempt: Attempt) -> Outcome:
    soak.wait_for(soak.unfinished, attempt, 0.002)
    name = next((path.name for path in soak.unfinished()), "a checkpoint that was just finished")
    time.sleep(float(soak.draw.uniform(0, 0.1)))
    rank, pid = soak.choose_rank(attempt)
    os.kill(pid, signal.SIGKILL)
    return f"rank {rank} killed while {name} was written", LOST


def stop_rank(soak: Soak, attempt: Attempt) -> Outcome:
    rank, pid = soak.choose_rank(attempt)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    os.kill(pid, signal.SIGCONT)
    return f"rank {rank} stopped for {PAUSE:g} s", None


def slow_rank(soak: Soak, attempt: Attempt) -> Outcome:
    rank, pid = soak.choose_rank(attempt)
    for _ in range(30):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)
    return f"rank {rank} slowed to a quarter for 12 s", None


def corrupt_newest(soak: Soak, attempt: Attempt, *, cut: bool = False) -> Outcome:
    soak.wait_for(lambda: len(soak.saved()) > 1, attempt)
    kill_in_step(soak, attempt)
    attempt.wait()
    newest = checkpoint_path(soak.run / "checkpoints", soak.saved()[-1])
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        if cut:
            opened.truncate(size // 2)
        else:
            opened.seek(size // 2)
            byte = opened.read(1)
            opened.seek(size // 2)
            opened.write(bytes([byte[0] ^ 1]))
    return f"a rank killed, and {newest.name}/{file.name} {'cut in half' if cut else 'given a flipped bit'}", LOST


def cut_newest(soak: Soak, attempt: Attempt) -> Outcome:
    return corrupt_newest(soak, attempt, cut=True)


def full_disk(soak: Soak, attempt: Attempt) -> Outcome:
    filler = soak.run / "filler"
    with filler.open("wb", buffering=0) as opened, suppress(OSError):
        while True:
            opened.write(bytes(1 << 16))
    try:
        attempt.wait()
    finally:
        filler.unlink()
    return "the disk of the run was full", REFUSED


def _send(soak: Soak, attempt: Attempt, number: signal.Signals) -> Outcome:
    to = ("one rank", "the launcher", "all processes")[int(soak.draw.integers(3))]
    if to == "one rank":
        os.kill(soak.choose_rank(attempt)[1], number)
    elif to == "the launcher":
        attempt.process.send_signal(number)
    else:
        os.killpg(attempt.process.pid, number)
    return f"{number.name} to {to}", STOPPED


def send_sigterm(soak: Soak, attempt: Attempt) -> Outcome:
    return _send(soak, attempt, signal.SIGTERM)


def send_sigusr1(soak: Soak, attempt: Attempt) -> Outcome:
    return _send(soak, attempt, signal.SIGUSR1)


def send_sighup(soak: Soak, attempt: Attempt) -> Outcome:
    return _send(soak, attempt, signal.SIGHUP)


def remove_corpus_file(soak: Soak, attempt: Attempt) -> Outcome:
    """Stop the run and take a file of its corpus away: the next start is refused by its name, and one later goes on."""
    attempt.process.send_signal(signal.SIGTERM)
    attempt.wait()
    file = sorted((soak.folder / "texts").glob("*"))[int(soak.draw.integers(2))]
    file.rename(soak.folder / "away")
    try:
        with soak.start() as refused:
            status, text = refused.wait(), refused.text()
    finally:
        (soak.folder / "away").rename(file)
    if status != REFUSED or file.name not in text:
        raise SoakError(f"without {file.name} the run ended with {status}, not with {REFUSED} and its name:\n{text}")
    return f"SIGTERM, then {file.name} was gone: refused by name", STOPPED


FAULTS = {
    fault.__name__: fault
    for fault in (
        kill_in_step,
        kill_in_evaluation,
        kill_in_save,
        stop_rank,
        slow_rank,
        corrupt_newest,
        cut_newest,
        full_disk,
        send_sigterm,
        send_sigusr1,
        send_sighup,
        remove_corpus_file,
    )
}


def run_under_faults(soak: Soak, faults: list[str], between: tuple[int, int]) -> None:
    """Bring a run to its end under faults: each of the list once, in a random order, before one comes again."""
    names, at, since = list[str](), 0, time.monotonic()
    recovering = dict[str, Any]()
    while True:
        with soak.start() as attempt:
            while True:
                if recovering and soak.wait_for(lambda row=recovering: soak.done() <= row["saved"], attempt):
                    # the rows of the steps that were lost are gone; now the next one comes
                    soak.wait_for(lambda row=recovering: soak.done() > row["saved"], attempt)
                    recovering["seconds_to_next_step"] = round(time.monotonic() - since, 1)
                at = at or soak.done() + int(soak.draw.integers(*between, endpoint=True))
                recovering = {}
                if not soak.wait_for(lambda: soak.done() >= at, attempt):  # noqa: B023
                    break
                at = 0
                soak.note_descriptors(attempt)
                names = names or list(soak.draw.permutation(faults))
                name, before = names.pop(), soak.done()
                row: dict[str, Any] = {"fault": name, "after_step": before, "world": attempt.world}
                soak.rows.append(row)
                row["done"], expected = FAULTS[name](soak, attempt)
                if expected is None:
                    print(f"step {before}: {row['done']}; the run goes on", flush=True)
                    continue
                status, since = attempt.wait(), time.monotonic()
                row |= {"status": status, "printed": _last_lines(attempt.text())}
                if soak.done() == soak.steps and status == 0:
                    break  # the fault came after the last step
                if status != expected:
                    raise SoakError(f"{row['done']}: status {status}, not {expected}:\n{attempt.text()[-3000:]}")
                good = soak.saved()[:-1] if name in ("corrupt_newest", "cut_newest") else soak.saved()
                row["saved"] = max(good, default=0)
                row["steps_lost"] = soak.done() - row["saved"]
                recovering = row
                print(f"step {before}: {row['done']}; status {status}, {row['steps_lost']} steps lost", flush=True)
                break
        if attempt.process.returncode == 0 and soak.done() >= soak.steps:
            return
        if not recovering:
            raise SoakError(f"the run ended with {attempt.process.returncode} by itself:\n{attempt.text()[-3000:]}")


def run_in_other_worlds(soak: Soak, between: tuple[int, int]) -> None:
    """Bring a run to its end, by turns on all ranks and on one fewer."""
    while True:
        world = soak.world - soak.attempts % 2
        with soak.start(world) as attempt:
            at = soak.done() + int(soak.draw.integers(*between, endpoint=True))
            if soak.wait_for(lambda: soak.done() >= at, attempt):  # noqa: B023
                attempt.process.send_signal(signal.SIGTERM)
            status = attempt.wait()
        soak.rows.append({"fault": "other_world", "world": world, "after_step": soak.done(), "status": status})
        print(f"step {soak.done()}: {world} ranks ended with {status}", flush=True)
        if status not in (0, STOPPED):
            raise SoakError(f"{world} ranks ended with {status}:\n{attempt.text()[-3000:]}")
        if status == 0:
            return


def write_run(folder: Path, texts: Path, steps: int, kind: str) -> None:
    """The run's configuration in a folder of its own; its texts lie beside it.

    Evaluations have degree 2 where the number of ranks stays, since 2 divides no 7. Where it changes, sums round in
    another order, and AdamW with its usual eps magnifies 1e-16 to 1e-2 in 300 steps: a larger eps does not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "texts").exists():
        shutil.copytree(texts, folder / "texts")
    fixed, planned = 'eval_planner = "fixed"\neval_context_parallel_size = 2', 'eval_planner = "dynamic"'
    evaluation, rates = (planned, "lr = 1e-2\neps = 1e-2") if kind == "other_worlds" else (fixed, "lr = 1e-3")
    places = {"texts": folder / "texts", "dir": folder / "run"}
    text = CONFIG.format(**places, steps=steps, stopped=STOPPED, evaluation=evaluation, rates=rates)
    (folder / "config.toml").write_text(text)


def write_texts(folder: Path) -> Path:
    """Two files of texts of log-normal length."""
    if folder.exists():
        return folder
    draw, words = np.random.default_rng(7), ("def", "class", "return", "import", "value", "while", "yield", "None")
    folder.mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl"):
        lengths = np.clip(draw.lognormal(3.5, 0.9, 400).astype(int), 3, 300)
        rows = [json.dumps({"text": " ".join(draw.choice(words, size=n))}) for n in lengths]
        (folder / name).write_text("\n".join(rows) + "\n")
    return folder


def compare_weights(ours: Path, reference: Path) -> float:
    """The largest relative difference of a weight's tensor; 0.0 where all bits are equal."""
    left, right = load_file(ours / "model.safetensors"), load_file(reference / "model.safetensors")
    if left.keys() != right.keys():
        raise SoakError(f"the runs have other weights: {sorted(left.keys() ^ right.keys())}")
    others = [name for name in left if not torch.equal(left[name], right[name])]
    return max((float((left[name] - right[name]).norm() / right[name].norm()) for name in others), default=0.0)


def run_undisturbed(soak: Soak) -> float:
    """Run to the end without a fault; returns the seconds. What an earlier command ended begins anew."""
    if soak.read():
        return soak.seconds
    shutil.rmtree(soak.run, ignore_errors=True)
    started = time.monotonic()
    with soak.start() as attempt:
        soak.wait_for(lambda: False, attempt, 0.5)
        if (status := attempt.wait()) != 0:
            raise SoakError(f"the undisturbed run ended with {status}:\n{attempt.text()[-3000:]}")
    soak.seconds = time.monotonic() - started
    soak.write()
    return soak.seconds


def check_what_is_left(soak: Soak) -> None:
    """Raise SoakError for a checkpoint that is unfinished, or for descriptors that grew by more than a handful."""
    if left := soak.unfinished():
        raise SoakError(f"left in the run's folder: {', '.join(path.name for path in left)}")
    if soak.descriptors and soak.descriptors[-1] > min(soak.descriptors) + 10:
        raise SoakError(f"a rank's open files grew: {soak.descriptors}")


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """A small disk of its own under a folder; False where this user may mount none.

    What lies on it is copied next to it at the end, and is there again when a later command goes on.
    """
    away = folder.with_name(f"{folder.name}-kept")
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if mounted and away.exists():
        shutil.copytree(away, folder, dirs_exist_ok=True, symlinks=True)
    try:
        yield mounted
    finally:
        if mounted:
            shutil.rmtree(away, ignore_errors=True)
            shutil.copytree(folder, away, symlinks=True)
            subprocess.run(["umount", "-l", str(folder)], check=False)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _wait_until_gone(session: int) -> None:
    """Wait until no process of a session lives. Raises SoakError with those that stay for 30 seconds, and ends them."""
    deadline = time.monotonic() + 30
    while living := [pid for pid in _processes() if _session(pid) == session]:
        if time.monotonic() > deadline:
            commands = [_command(pid).replace("\0", " ")[:120] for pid in living]
            for pid in living:
                os.kill(pid, signal.SIGKILL)
            raise SoakError(f"processes are left: {commands}")
        time.sleep(0.1)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _session(pid: int) -> int:
    """The session of a process that lives; 0 where it does not."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return 0
    return 0 if state == "Z" else int(session)


def _last_lines(text: str) -> list[str]:
    """What a run printed at its end, as it would be read in a terminal."""
    lines = [line.rpartition("\r")[2].rstrip()[:400] for line in text.splitlines()]
    return [line for line in lines if line][-6:]


def _end_from_outside(*_: Any) -> None:
    raise SoakError("ended by SIGTERM before it was done")


def main() -> None:
    """Run undisturbed, run under faults, compare, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--other_worlds", type=int, default=300, help="steps of the run with one rank fewer; 0: none")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--between", default="50,150", help="fewest and most steps from a fault to the next")
    parser.add_argument("--faults", default=",".join(FAULTS), help="those to draw from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", action="store_true", help="the undisturbed run beside the other, for many cores")
    parser.add_argument("--folder", type=Path, help="for the runs, which stay there: the same command goes on later")
    parser.add_argument("--out", type=Path, help="a .json file; the table goes beside it")
    flags = parser.parse_args()
    few, most = map(int, flags.between.split(","))
    faults = flags.faults.split(",")
    if unknown := [name for name in faults if name not in FAULTS]:
        sys.exit(f"--faults names {unknown[0]!r}; faults are {', '.join(FAULTS)}")
    record: dict[str, Any] = {
        "bench": "soak",
        "machine": machine_facts(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "command": "python " + " ".join(["bench/soak.py", *sys.argv[1:]]),
        "world": flags.world,
    }
    failure = None
    signal.signal(signal.SIGTERM, _end_from_outside)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; a run would ignore it too, and it is a fault
        signal.signal(signal.SIGHUP, lambda *_: None)
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = (flags.folder or Path(name)).resolve()
        refuse_another_soak(folder, flags)
        try:
            record |= soak_all(folder, flags, faults, (few, most), record)
        except SoakError as error:
            failure = record["failure"] = str(error)
    if flags.out:
        flags.out.write_text(json.dumps(record, indent=1) + "\n")
        flags.out.with_suffix(".md").write_text(record_text(record))
    if failure:
        sys.exit(failure)


def refuse_another_soak(folder: Path, flags: argparse.Namespace) -> None:
    """Exit where a folder has a soak of other flags: its runs and its rows are not those of this one."""
    file, names = folder / "flags.json", ("steps", "other_worlds", "world", "between", "faults", "seed")
    flag_values = {name: getattr(flags, name) for name in names}
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(flag_values))
        return
    stored = json.loads(file.read_text())
    if others := [
        f"--{name} {stored.get(name)}, not {value}" for name, value in flag_values.items() if stored.get(name) != value
    ]:
        sys.exit(f"{folder} has a soak of {'; '.join(others)}: give the same flags, or another --folder")


def soak_all(
    folder: Path, flags: argparse.Namespace, faults: list[str], between: tuple[int, int], record: dict[str, Any]
) -> dict[str, Any]:
    """The results of all runs; what is known when one fails is in `record`."""
    draw, texts = np.random.default_rng(flags.seed), write_texts(folder / "texts")
    for kind, steps in (("faults", flags.steps), ("other_worlds", flags.other_worlds)):
        if not steps:
            continue
        reference = Soak(folder / kind / "reference", steps, flags.world, np.random.default_rng(flags.seed))
        disturbed = Soak(folder / kind / "run", steps, flags.world, draw)
        write_run(reference.folder, texts, steps, kind)
        goes_on = disturbed.read()
        results = record[kind] = {"steps": steps, "rows": disturbed.rows}
        started, earlier = time.monotonic(), disturbed.seconds
        with ThreadPoolExecutor(1) as threads, small_disk(disturbed.folder / "run", 512) as mounted:
            undisturbed = threads.submit(run_undisturbed, reference)
            try:
                if not flags.together:
                    undisturbed.result()
                write_run(disturbed.folder, texts, steps, kind)
                started = time.monotonic()
                if goes_on and disturbed.done() < steps:
                    disturbed.rows.append(
                        {
                            "fault": "soak_ended",
                            "done": "the soak itself was ended; all killed",
                            "after_step": disturbed.done(),
                        }
                    )
                if kind == "other_worlds":
                    run_in_other_worlds(disturbed, (between[0] // 2, between[1] // 2))
                else:
                    drawn = [name for name in faults if mounted or name != "full_disk"]
                    results["left_out"] = sorted({*FAULTS} - {*drawn})
                    run_under_faults(disturbed, drawn, between)
                results["seconds"] = round(earlier + time.monotonic() - started, 1)
                results["undisturbed_seconds"] = round(undisturbed.result(), 1)
                results["difference"] = compare_weights(disturbed.run / "model", reference.run / "model")
                results["descriptors"] = disturbed.descriptors
                check_what_is_left(disturbed)
            except BaseException:
                if reference.process is not None:
                    reference.process.kill()
                raise
            finally:
                if disturbed.attempts:
                    disturbed.seconds = earlier + time.monotonic() - started
                    disturbed.write()
        print(f"{kind}: {steps} steps without a fault in {results['undisturbed_seconds']:.0f} s")
        print(f"{kind}: largest difference of the weights {results['difference']:.1e}", flush=True)
        bound = 1e-6 if kind == "other_worlds" else 0.0
        if results["difference"] > bound:
            raise SoakError(f"{kind}: the weights differ by {results['difference']:.1e}, more than {bound:g}")
    return record


def record_text(record: dict[str, Any]) -> str:
    """The record as a page."""
    lines = ["# Soak", "", f"`{record['command']}`", "", machine_text(record["machine"]), "", record["versions"], ""]
    for kind in ("faults", "other_worlds"):
        if (results := record.get(kind)) is None:
            continue
        figures = f"{results['steps']} steps on {record['world']} ranks"
        if "difference" in results:
            figures += f" in {results['seconds']:.0f} s; undisturbed in {results['undisturbed_seconds']:.0f} s. "
            figures += f"Largest relative difference of the last weights: {results['difference']:.1e}"
        lines += [f"## {kind.replace('_', ' ').capitalize()}", "", figures + ".", ""]
        lines += ["| after step | what was done | exit status | steps lost | s to the next step | last line printed |"]
        lines += ["|--:|---|--:|--:|--:|---|"]
        for row in results["rows"]:
            done = row.get("done") or f"{row['world']} ranks"
            printed = (row.get("printed") or [""])[-1].replace("|", "\\|")
            cells = (row.get("status", "goes on"), row.get("steps_lost", ""), row.get("seconds_to_next_step", ""))
            lines.append(f"| {row['after_step']} | {done} | {' | '.join(map(str, cells))} | {printed} |")
        lines.append("")
    if "failure" in record:
        lines += ["## Failure", "", "```", record["failure"], "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

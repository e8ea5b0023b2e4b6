"""When a rank dies, raises or hangs, the others stop within the time-out and say which."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from longspan.comm import failure_reports, process_groups, rendezvous, watch as answering
from longspan.comm.failure_reports import FailureReports
from longspan.comm.watch import AnsweringThread, Watch
from longspan.comm.world import World
from longspan.config.sections import RunConfig
from longspan.errors import CommError, RankLostError
from longspan.launch.launch import run_local
from longspan.layout import Layout
from longspan.testing import backend, run_ranks
from tests.train.small import small_config, train_rank

on_gloo = pytest.mark.skipif(backend() != "gloo", reason="NCCL ends a stuck process instead of raising in it")
RING = r"'(ring of four|leaving the world)' of step 7 between ranks \(0, 1, 2, 3\)"
FAILURES = {  # what rank 2 does instead of entering -> what the launcher raises, and what the others say
    "kill": (RankLostError, "rank 2 of 4 was killed by signal 9", "failed .*rank 2 does not answer: it was killed"),
    "raise": (KeyError, "boom", "failed .*rank 2 left with KeyError: 'boom'"),
    "hang": (RankLostError, RING + " timed out", ".*rank 2 is computing in step 7, after 'barrier'"),
}


def walk(rank: int, how: str) -> None:
    with World(Layout(ranks=4), backend=backend(), timeout=2 if how == "hang" else 60) as world:
        world.step = 7
        world.control.barrier()
        if rank == 2:
            time.sleep(0.2)  # the others are in the exchange by now
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise KeyError("boom")
            time.sleep(60)
        channel, x = world.channels.find_channel((0, 1, 2, 3)), torch.ones(5, device=world.device)
        right, left = (channel.index + 1) % 4, (channel.index - 1) % 4
        channel.exchange([(right, x)], [(left, x.clone())], "ring of four").wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize()


@on_gloo
@pytest.mark.parametrize("how", ["kill", "raise", pytest.param("hang", marks=pytest.mark.whole)])
def test_the_others_stop_and_say_which(how: str) -> None:
    kind, launcher, survivors = FAILURES[how]
    before = time.monotonic()
    with pytest.raises(kind, match=launcher) as raised:
        run_local(walk, 4, (how,), timeout=100, grace=2.5 if how == "hang" else 6, threads=1)
    assert time.monotonic() - before < 50
    notes = getattr(raised.value, "__notes__", [])
    said = [note for note in notes if re.search(f"{RING} {survivors}", note)]
    assert len(said) >= (2 if how == "hang" else 3), notes
    assert how != "hang" or "rank 2: was still running and was killed" in notes
    assert (type(raised.value) is RankLostError) == (how != "raise"), "a restart helps"
    name = "CommError" if how == "raise" else "RankLostError"
    assert all(re.match(rf"rank [013]: {name}", note) for note in said), said


def wait_in_vain(rank: int, folder: Path) -> None:
    """Rank 1 leaves with an error and keeps its connections; rank 0 is in a barrier, rank 2 at work of its own."""
    answering.LEFT_SECONDS = 0.5
    group = None
    try:
        with World(Layout(ranks=3), backend="gloo", timeout=60) as world:
            group = world.control.group
            if rank == 1:
                raise ValueError("not today")
            if rank == 0:
                world.control.barrier()
            time.sleep(1.4)  # longer than LEFT_SECONDS and two looks
            (folder / "at work").touch()
            raise ValueError("over")
    except ValueError:
        time.sleep(15)
    assert group is not None


def test_a_rank_that_waits_for_one_that_left_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = time.monotonic()
    with pytest.raises(CommError, match="rank 0 of 3 was killed by signal 6") as raised:
        run_local(wait_in_vain, 3, (tmp_path,), grace=1.5, threads=1)
    assert time.monotonic() - before < 50 and (tmp_path / "at work").exists()
    assert "rank 1: was still running and was killed" in raised.value.__notes__
    assert re.search(
        r"longspan: 'barrier' of step 0 between ranks \(0, 1, 2\) failed on rank 0 .*rank 1 left with ValueError: not",
        capfd.readouterr().err,
    )


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    store = HashStore()
    both = [Watch(rank, (0, 1), 9.0, FailureReports(rank, (0, 1), store, "world")) for rank in (0, 1)]
    threads = [AnsweringThread(watch) for watch in both]
    for thread in threads:
        thread.start()
    yield both
    for thread in threads:
        thread.stop()


def fail_in(watch: Watch, what: str) -> str:
    with pytest.raises(CommError) as raised, watch.enter_operation(what, (0, 1)):
        raise RuntimeError("connection closed")
    return str(raised.value)


def test_every_failure_has_a_report_of_its_own(watches: list[Watch]) -> None:
    first, second = watches
    with second.enter_operation("a gather", (0, 1)):
        earlier = first.enter_operation("an early collective", (0, 1)).__enter__()
        assert "rank 1 is in 'a gather' of step 0" in fail_in(first, "one")
    second.step = 3
    second.last_label = "a later sum"
    assert "rank 1 is computing in step 3, after 'a later sum'" in fail_in(first, "two")
    assert "rank 0 is in 'an early collective'" in fail_in(second, "three"), "rank 0 has not left it"
    answer = first.failure_error(earlier, RuntimeError("closed"))
    assert "rank 0 is in 'an early collective'" in str(answer), "one that was there before is not asked about again"


def test_a_store_that_fails_for_a_while_is_asked_again(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls, has_departure_or_request = [], FailureReports.has_departure_or_request

    def fails_at_first(reports: FailureReports) -> bool:
        calls.append(reports)
        if len(calls) <= 4:
            raise RuntimeError("connection reset by peer")
        return has_departure_or_request(reports)

    monkeypatch.setattr(FailureReports, "has_departure_or_request", fails_at_first)
    while len(calls) < 4:
        time.sleep(0.05)
    assert "rank 1 is computing in step 0" in fail_in(watches[0], "one")
    assert capfd.readouterr().err == ""


def test_a_store_that_stays_silent_is_told_of_and_gpus_are_watched_on(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(reports: FailureReports) -> bool:
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(answering, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(FailureReports, "has_departure_or_request", fails)
    said, looked = "", list[int]()
    while said.count("answers for no more failure reports") < 2:
        time.sleep(0.05)
        said += capfd.readouterr().err
    assert "the store has not answered for 0.3 s" in said and "connection reset" in said
    monkeypatch.setattr(AnsweringThread, "_end_with_stuck_device", lambda thread: looked.append(thread.watch.rank))
    while set(looked) != {0, 1}:
        time.sleep(0.05)


def test_a_message_that_does_not_return_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()
    monkeypatch.setattr(AnsweringThread, "_end_process", lambda thread, operation, why: ended.append(operation.label))
    watch = Watch(1, (0, 1), 9.0, None)
    thread = AnsweringThread(watch)

    def look(*, is_work: bool = False, seconds: float = 20.0, failed: bool = False) -> list[str]:
        with watch.enter_operation("a first message", (0, 1), is_work=is_work) as operation:
            operation.started -= seconds
            watch.last_failed = operation if failed else None
            thread._end_with_stuck_host()
            thread._end_with_stuck_host()
        thread._end_with_stuck_host()
        return [ended.pop() for _ in ended[:]]

    assert look() == ["a first message"], "seen twice, ended once"
    assert not look(seconds=12.0), "within its limit and what an error takes"
    assert not look(is_work=True), "the pipeline of a step, the writing of a checkpoint"
    assert not look(failed=True), "its report is being made"


OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate")]


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, MemoryError()], ids=repr)
def test_memory_that_is_short_is_no_failed_collective(error: Exception) -> None:
    watch = Watch(0, (0, 1), 1.0, None)
    for context in (watch.enter_operation("pipeline", (0, 1)), watch.name_collectives("passes", (0, 1))):
        with pytest.raises(type(error)) as raised, context:
            raise error
        assert raised.value is error and watch.current is None
    with pytest.raises(CommError, match="'pipeline' of step 0"), watch.enter_operation("pipeline", (0, 1)):
        raise RuntimeError("connection closed")
    assert watch.current is None


def serve_the_store() -> None:
    """Rank 0 serves the store itself, as where ranks are started one by one (srun)."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": os.environ["TEST_PORT"]}


@pytest.fixture
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TEST_PORT", str(free.getsockname()[1]))


def lose_the_store(rank: int) -> None:
    serve_the_store()
    with World(Layout(ranks=2), backend="gloo", timeout=60) as world:
        world.control.barrier()
        if rank == 0:
            os._exit(0)
        world.control.barrier("last barrier")


@pytest.mark.usefixtures("free_port")
def test_the_rank_that_served_the_store_is_missed() -> None:
    with pytest.raises(CommError, match="rank 0 of 2 left with exit code 0") as raised:
        run_ranks(lose_the_store, 2)
    (note,) = raised.value.__notes__
    assert re.search(
        "'last barrier' .* rank 0, which serves the store, does not answer: killed, cut off or stopped", note
    )


STOPPED_IN = {
    "step": "longspan.run.run_data.TrainingRun.take_step",
    "evaluation": "longspan.run.evaluations.evaluate",
    "save": "longspan.checkpoint.storage.SafetensorsWriter.write_data",
    "new group": "torch.distributed.new_group",
}


def stop_in(rank: int, where: str, config: RunConfig) -> None:
    serve_the_store()
    rendezvous.STORE_SECONDS = 2.0
    if rank == 0:
        mock.patch(STOPPED_IN[where], lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)).start()
    train_rank(rank, config, 2)


@on_gloo
@pytest.mark.usefixtures("free_port")
@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=() if where == "step" else pytest.mark.whole) for where in STOPPED_IN]
)
def test_a_stopped_rank_that_serves_the_store_is_named_in_time(
    where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {"run__timeout_seconds": 4.0, "evaluation__every": 1, "checkpoint__every": 2, "train__steps": 4}
    with pytest.raises(CommError) as raised:
        run_local(stop_in, 2, (where, small_config(tmp_path, **keys)), timeout=100, grace=1, threads=1)
    said = f"{raised.value}\n{capfd.readouterr().err}"  # an error of the other rank, or what ended it
    named = r"rank 1 .*rank 0, which serves (the store, does not answer: killed, cut off or stopped|it, runs)"
    assert re.search(named, said), said


def hang_on_a_gpu(rank: int) -> None:
    with World(Layout(ranks=2), backend="nccl", timeout=5) as world:
        world.step = 7
        if rank == 1:
            time.sleep(60)
        channel, x = world.channels.find_channel((0, 1)), torch.ones(5, device=world.device)
        channel.exchange([(1 - rank, x)], [(1 - rank, x.clone())], "pair").wait()
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_stuck_gpu_is_reported_and_its_process_ended(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommError, match="rank 0 of 2 was killed by signal 6"):
        run_local(hang_on_a_gpu, 2, grace=1)
    assert re.search(
        r"longspan: 'pair' of step 7 between ranks \(0, 1\) timed out on rank 0 .*rank 1 is computing in step 7",
        capfd.readouterr().err,
    )


# ---- a rank that hangs is named in one message, with what torch recorded; other ranks say one line


def set_timeout(world: World, seconds: float) -> None:
    world.watch.timeout = seconds
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def hang(rank: int, where: str, folder: Path) -> str:
    try:
        with World(Layout(ranks=3), backend="gloo", timeout=600) as world:
            world.step, world.watch.notes = 7, ("slot 1 is 31 % slower than its plan",)
            x, group = torch.ones(4), world.meshes.fsdp.get_group()
            world.control.sum_array_over_ranks(torch.ones(1 << 14).numpy(), "a first sum")  # which connects the ranks
            dist.all_reduce(x, group=group)
            set_timeout(world, 1)
            own = where == "torch's"  # as FSDP2's
            with (
                world.watch.name_collectives("forward and backward passes", world.home.ranks) if own else nullcontext()
            ):
                if rank == 2:
                    time.sleep(60)
                if where == "collective":
                    world.control.sum_array_over_ranks(torch.ones(1 << 14).numpy(), "a large sum")
                dist.all_reduce(x, group=group)
    except CommError as error:
        return str(error)
    finally:
        (folder / f"rank {rank}").touch()
    return ""


def hang_on_all_but_one(rank: int, where: str, folder: Path) -> str:
    """`hang`, in which the last rank is ended when the others have their errors."""
    if rank == 2:
        threading.Thread(target=hang, args=(rank, where, folder), daemon=True).start()
        while not all((folder / f"rank {other}").exists() for other in (0, 1)):
            time.sleep(0.1)
        return ""
    return hang(rank, where, folder)


CASES = {  # what the others wait in, and what the error says of the last rank
    "collective": ("'a large sum' of step 7", "rank 2 is computing in step 7, after 'a first sum'"),
    "torch's": ("'forward and backward passes' of step 7", "rank 2 is computing in step 7, in 'forward and backward"),
}


@on_gloo
@pytest.mark.parametrize("where", CASES)
def test_a_hang_is_named_once_with_what_torch_recorded(where: str, tmp_path: Path) -> None:
    what, cause = CASES[where]
    messages = run_ranks(hang_on_all_but_one, 3, where, tmp_path)[:2]
    for message in messages:
        first = message.splitlines()[0]
        assert first.startswith(what) and "timed out" in first and "(limit 1 s)" in first and cause in first, message
    (short,) = [message for message in messages if "\n" not in message]
    (full,) = [message for message in messages if "\n" in message]
    assert "prints what each rank does" in short
    lines = full.splitlines()
    assert len(lines) <= 20 and "slot 1 is 31 % slower than its plan" in full and "the backend said" in full
    assert lines[1].startswith("  rank 2 is computing"), "the rank that does not come is the first"
    last = {rank: next(line for line in lines[1:] if line.startswith(f"  rank {rank} ")) for rank in range(3)}
    assert all("torch recorded last: gloo:" in line for line in last.values()), full
    if where == "torch's":
        assert all('number 2 of the group "longspan slots"' in last[rank] for rank in (0, 1)), full
        assert 'number 1 of the group "longspan slots"' in last[2]


def test_a_recorder_that_is_off_or_stuck_leaves_a_report_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_reports, "_recorded_entries", lambda function: [])
    assert failure_reports.last_collective_text() == "", "nothing was recorded in this process"
    monkeypatch.setattr(failure_reports, "RECORDER_SECONDS", 0.01)
    release = threading.Event()
    monkeypatch.setattr(failure_reports, "_recorded_entries", lambda function: release.wait(30) and [])
    assert failure_reports.last_collective_text() == ""
    release.set()


def meet_late(rank: int) -> None:
    with World(Layout(ranks=3), backend="gloo", timeout=600) as world:
        set_timeout(world, 2)
        if rank != 2:
            time.sleep(60)
        x = torch.ones(4)
        world.channels.hosts.exchange([(1, x)], [(1, x.clone())], "a first message").wait()


@pytest.mark.whole
@on_gloo
def test_a_first_message_is_named_soon_after_the_limit(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommError) as raised:
        run_local(meet_late, 3, (), grace=40, threads=1)
    text = f"{raised.value}\n{capfd.readouterr().err}"  # gloo raises, or does not return, and the process is ended
    said = re.search(r"'a first message' of step 0 .* on rank 2 after ([\d.]+) s \(limit 2 s\): (.*)", text)
    assert said is not None and float(said[1]) < 20, text
    assert "rank 1 is computing in step 0" in said[2], text


SERVE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@contextmanager
def killed_store(connect: Callable[[dist.Store], object]) -> Iterator[None]:
    """A store of another process, which stands still once it is connected to, and is killed after the body."""
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            connect(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)))
            server.send_signal(signal.SIGSTOP)
            yield
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("limited", "lines"), [(True, 0), pytest.param(False, 1, marks=pytest.mark.whole)], ids=["longspan", "torch"]
)
def test_a_store_that_is_killed_while_it_is_asked_leaves_no_frames(
    limited: bool, lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    stores, errors = list[Any](), list[Exception]()

    def ask() -> None:
        try:
            stores[0].check(["news"])
        except RuntimeError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    with killed_store(lambda store: stores.append(rendezvous.LimitedStore(store) if limited else store)):
        asking.start()
        time.sleep(0.5)
    asking.join(10)
    assert len(errors) == 1 and "onnection" in str(errors[0])
    assert capfd.readouterr().err.count("recvValue failed") == lines
    assert rendezvous._torch_log_level().value == rendezvous._WARNING


def test_nccl_asks_no_store_each_second_unless_the_user_wants_its_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str | None]()
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(process_groups._DUMP)))
    monkeypatch.delenv(process_groups._DUMP, raising=False)
    place = rendezvous.Place(0, 1, 0, "", "")
    process_groups.init_default_group(place, HashStore(), "nccl", 5.0)
    assert process_groups._DUMP not in os.environ
    monkeypatch.setenv(process_groups._DUMP, "1")
    process_groups.init_default_group(place, HashStore(), "nccl", 5.0)
    assert seen == ["0", "1"]


@pytest.mark.gpu
@pytest.mark.parametrize(("dumps", "noisy"), [(None, False), ("1", True)])
def test_an_nccl_group_whose_store_is_gone_writes_no_frames(
    dumps: str | None, noisy: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, for torch's first NCCL group alone asks the store."""
    if dumps:
        monkeypatch.setenv(process_groups._DUMP, dumps)
    run_ranks(ask_through_nccl, 1)
    assert ("recvValue failed" in capfd.readouterr().err) == noisy


def ask_through_nccl(rank: int) -> None:
    def connect(store: dist.Store) -> None:
        process_groups.init_default_group(rendezvous.Place(0, 1, 0, "", ""), store, "nccl", 30.0)

    with killed_store(connect):
        pass
    time.sleep(4)

"""A rank that hangs is named in one message of at most 20 lines, with what torch recorded; other ranks say one line."""

import os
import pickle
import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longspan.comm import failure_reports as recorded
from longspan.comm.world import World
from longspan.errors import CommError
from longspan.launch.launch import run_local
from longspan.layout import Layout
from longspan.testing import backend, run_ranks

pytestmark = pytest.mark.skipif(backend() != "gloo", reason="NCCL ends a stuck process instead of raising in it")
LINES = 20


def set_timeout(world: World, seconds: float) -> None:
    """Shorten the limit of a world that was opened with a long one."""
    world.watch.timeout = seconds
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def hang(rank: int, where: str, folder: Path) -> str:
    """What the error of a rank says whose last rank does not come; the world was opened with a long limit."""
    try:
        with World(Layout(ranks=3), backend="gloo", timeout=600) as world:
            world.step, world.watch.folder, world.watch.notes = 7, folder, ("slot 1 is 31 % slower than its plan",)
            x, group = torch.ones(4), world.meshes.fsdp.get_group()
            world.control.sum_of_arrays(torch.ones(1 << 14).numpy(), "a first sum")  # which connects the ranks
            dist.all_reduce(x, group=group)
            set_timeout(world, 2)
            last = rank == 2
            if where == "message":
                if last:
                    time.sleep(60)
                world.control.barrier("messages in pairs")
            elif where == "collective":
                if last:
                    time.sleep(60)
                world.control.sum_of_arrays(torch.ones(1 << 14).numpy(), "a large sum")
            else:  # as FSDP2's, which torch starts
                with world.watch.naming("forward and backward passes", world.home.ranks):
                    if last:
                        time.sleep(60)
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
    "message": ("'messages in pairs' of step 7", "rank 2 is computing in step 7, after 'a first sum'"),
    "collective": ("'a large sum' of step 7", "rank 2 is computing in step 7, after 'a first sum'"),
    "torch's": ("'forward and backward passes' of step 7", "rank 2 is computing in step 7, in 'forward and backward"),
}


@pytest.mark.parametrize("where", CASES)
def test_a_hang_is_named_once_with_what_torch_recorded(where: str, tmp_path: Path) -> None:
    what, cause = CASES[where]
    messages = run_ranks(hang_on_all_but_one, 3, where, tmp_path)[:2]
    for message in messages:
        first = message.splitlines()[0]
        assert first.startswith(what) and "timed out" in first and "(limit 2 s)" in first and cause in first, message
    (short,) = [message for message in messages if "\n" not in message]
    (full,) = [message for message in messages if "\n" in message]
    assert "prints what each rank does" in short
    lines = full.splitlines()
    assert len(lines) <= LINES and "slot 1 is 31 % slower than its plan" in full and "the backend said" in full
    assert lines[1].startswith("  rank 2 is computing"), "the rank that does not come is the first"
    last = {rank: next(line for line in lines[1:] if line.startswith(f"  rank {rank} ")) for rank in range(3)}
    assert all("torch recorded last: gloo:" in line for line in last.values()), full
    if where == "torch's":
        assert all('number 2 of the group "longspan slots"' in last[rank] for rank in (0, 1)), full
        assert 'number 1 of the group "longspan slots"' in last[2]
    for rank in range(3):
        trace = pickle.loads((tmp_path / f"gloo_trace_rank_{rank}").read_bytes())
        assert trace["entries"] and trace["entries"][-1]["frames"], "with the program's stacks"


def test_a_recorder_that_is_off_or_stuck_leaves_a_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_entries", lambda function: [])
    assert recorded.last_collective() == "", "nothing was recorded in this process"
    recorded.write_traces(tmp_path / "none", 0)
    assert not list((tmp_path / "none").iterdir())
    monkeypatch.setattr(recorded, "PATIENCE", 0.01)
    release = threading.Event()
    monkeypatch.setattr(recorded, "_entries", lambda function: release.wait(30) and [])
    assert recorded.last_collective() == ""
    release.set()


def meet_late(rank: int, is_gone: bool) -> None:
    """Rank 2 sends its first message to rank 1, which does not come, or is gone; they are connected by it."""
    with World(Layout(ranks=3), backend="gloo", timeout=600) as world:
        set_timeout(world, 2)
        if rank == 1 and is_gone:
            os._exit(9)
        if rank != 2:
            time.sleep(60)
        x = torch.ones(4)
        world.channels.hosts.exchange([(1, x)], [(1, x.clone())], "a first message").wait()


@pytest.mark.whole
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_first_message_is_named_soon_after_the_limit(is_gone: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommError) as raised:
        run_local(meet_late, 3, (is_gone,), grace=40, threads=1)
    text = f"{raised.value}\n{capfd.readouterr().err}"  # gloo raises, or does not return, and the process is ended
    said = re.search(r"'a first message' of step 0 .* on rank 2 after ([\d.]+) s \(limit 2 s\): (.*)", text)
    assert said is not None and float(said[1]) < 20, text
    assert re.search(r"\b1\b.* (killed|exit code 9)" if is_gone else "rank 1 is computing in step 0", said[2]), text

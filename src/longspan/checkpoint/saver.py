"""Checkpoints that are written while training goes on: `CheckpointSaver`.

A save copies what it holds to the host, during the next forward and backward passes, and a thread writes the files: a
process would import the caller's `__main__` again. The threads of all ranks agree over a gloo group that nothing else
uses: a collective of theirs on the group of the steps' agreements would meet another one there.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer

from longspan.checkpoint.checkpoint import (
    OptimizerValues,
    contents_to_save,
    join_contents_of_ranks,
    save_checkpoint,
)
from longspan.checkpoint.files import (
    Digest,
    checkpoint_path,
    create_partial_folder,
    partial_path,
    publish_checkpoint,
    remove_folder,
    remove_old_checkpoints,
    require_local_root,
)
from longspan.checkpoint.host_copies import HostCopies, StagedTensors
from longspan.checkpoint.storage import SafetensorsWriter, first_failure_text
from longspan.comm import World, on_all_ranks
from longspan.comm.all_ranks import is_first_rank
from longspan.errors import CheckpointError, LongspanError
from longspan.host import free_host_bytes
from longspan.plain_text import LogLine, bytes_text, excerpt


@dataclass(eq=False)
class RunningSave:
    """A save in progress. Its thread sets what the main thread reads: `phase`, `failure`, `staged` and `ended`."""

    path: Path
    state: dict[str, Any]
    values: OptimizerValues
    keep: int
    staging: StagedTensors
    # This is a time of time.monotonic().
    started: float
    phase: str = "copying to the host"
    failure: BaseException | None = None
    shown: float = 0.0  # seconds that training paused for it
    # These are the seconds until the save ended.
    seconds: float = 0.0
    # These are the bytes of all ranks' files.
    bytes: int = 0
    given_up: bool = False  # nobody waits for it any more, and it is not published
    # The save's figures are in the metrics, or about to be.
    has_figures: bool = False
    staged: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def failure_text(self) -> str:
        """What went wrong on this rank; "" if nothing did."""
        if self.failure is None:
            return ""
        has_text = isinstance(self.failure, (CheckpointException, LongspanError))
        if has_text:
            return first_failure_text(self.failure)
        return f"{type(self.failure).__name__}: {self.failure}"

    def run(self, group: ProcessGroup, planner: DefaultSavePlanner, *, best: Callable[[], int]) -> None:
        """Copy, write and publish the checkpoint, and remove older ones, in the threads of all ranks of a group.

        `best` is called last, for training may have changed it. An error is kept in `failure`.
        """
        collectives = _DistWrapper(group, use_dist=True, coordinator_rank=0)  # torch's, of objects
        folder = partial_path(self.path)
        try:
            self._write_on_all_ranks(folder, collectives, group, planner)
            if collectives.is_coordinator:
                self.phase = "removing older checkpoints"
                remove_old_checkpoints(self.path.parent, self.keep, best=best())
        except BaseException as error:  # raised where the ranks meet next
            self.failure = error
            if collectives.is_coordinator:
                # The disk may lack just the room that the folder takes.
                remove_folder(folder)
        finally:
            self.seconds = time.monotonic() - self.started
            self.staged.set()
            self.ended.set()

    def _write_on_all_ranks(
        self, folder: Path, collectives: _DistWrapper, group: ProcessGroup, planner: DefaultSavePlanner
    ) -> None:
        """Entered by all ranks: a failure of any rank in one of these steps is raised on all, so that nothing is
        published that is not whole."""

        def finish_copies() -> None:
            self.staging.finish()
            self.staged.set()
            self.phase = "waiting for the other ranks' copies"

        @contextmanager
        def writing() -> Iterator[None]:
            self.phase = "writing its files"
            yield
            self.phase = "waiting for the other ranks' files"

        def publish(written: list[tuple[dict[str, Digest], OptimizerValues]]) -> int:
            self.phase = "publishing"
            if self.given_up:
                raise CheckpointError(f"{folder} came too late")
            return publish_checkpoint(folder, self.path, *join_contents_of_ranks(self.state, written))

        collectives.all_reduce("copy", finish_copies, lambda _: create_partial_folder(folder))
        self.phase = "planning"
        writer = SafetensorsWriter(folder, writing())
        dcp.save(self.staging.tensors, storage_writer=writer, planner=planner, process_group=group)
        self.bytes = collectives.all_reduce("publish", lambda: (writer.digests, self.values), publish)


_series = count()


def make_save_planner() -> DefaultSavePlanner:
    """Return torch's planner for a series of saves, which plans once: by this key torch keeps what ranks planned."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = f"longspan {next(_series)}"
    return planner


SPARE = 1.1  # times the bytes of all copies of a host that must be free there
_LOGGED = 0.1  # seconds of waiting from which a line says so
_POLL = 0.2  # seconds between two looks at a save that is waited for
_ENDS = 1.0  # seconds in which the threads of a save that failed end, once one of them has


class SaveFigures(NamedTuple):
    """What a save took: the seconds that training paused for it, those until it was published, and all ranks' bytes."""

    step: int
    shown_seconds: float
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"saved checkpoint {self.step} ({bytes_text(self.bytes)}) in {self.seconds:.1f} s; training paused for "
            f"{self.shown_seconds:.1f} s"
        )


class CheckpointSaver:
    """Writes checkpoints while training goes on, one at a time; made, and called, by all ranks together.

    >>> saver = CheckpointSaver("runs/mine", world, keep=3)
    >>> for step in range(1, 1001):
    ...     run_step(model, plan, documents, world, optimizer=optimizer)
    ...     if step % 100 == 0:
    ...         saver.save(model, optimizer, step=step, state={"epoch": 2})
    >>> saver.wait()

    The files are those of `save_checkpoint`. The newest `keep` good checkpoints stay (0: all), and so does `best`, the
    step of one more (0: none). `timeout` is the limit of one save in seconds. Where a host lacks the memory for the
    copies of its ranks, or without `background`, `save` returns when the checkpoint is there. `log` gets a line on the
    first rank where training waits. Leaving the world waits for the save in progress.

    What goes wrong is raised where the ranks meet next: by `raise_failure`, `wait` or `save`. Between `save` and the
    optimizer's next step, which waits for the copies, nothing but that step may change parameters and moments.
    """

    def __init__(
        self,
        root: str | Path,
        world: World,
        *,
        keep: int = 0,
        background: bool = True,
        timeout: float = 1800.0,
        log: LogLine = print,
    ) -> None:
        self.root: Path = require_local_root(root)
        self.keep: int = keep
        self.best: int = 0
        self.timeout: float = float(timeout)
        # These are the figures of the last save that was published.
        self.figures: SaveFigures | None = None
        self._world = world
        self._log = log if is_first_rank(world) else lambda _: None
        self._background = background
        self._running: RunningSave | None = None
        self._planner = make_save_planner()
        self._preparing: threading.Thread | None = None
        if background:
            groups = world.process_groups
            group = groups.make_group(world.home.ranks, "saves", backend="gloo", timeout=self.timeout)
            assert group is not None
            self._group = group
            with world.watch.enter_operation("making the saves group", world.home.ranks, is_work=True):
                # gloo finds peers through the launcher's store, which is gone when ranks whose launcher was killed
                # save once more: one empty message of each kind connects them now.
                collectives = _DistWrapper(group, use_dist=True, coordinator_rank=0)
                collectives.all_reduce("connecting", str, len)
                collectives.reduce_scatter("connecting", str, list)
            world.watch.background = self.activity
            world.on_leaving(self.close)

    @cached_property
    def _stage(self) -> HostCopies:
        return HostCopies(self._world.device)

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to take the host's memory for the copies, after the optimizer's first step, which makes the moments.

        On GPUs memory is registered at a few gigabytes a second, while training goes on; without this call the first
        `save` waits for it. All ranks agree here whether every host has room.
        """
        if not self._background or self._preparing is not None:
            return
        tensors, _ = contents_to_save(model, optimizer, self._world)
        if self._hosts_have_room(self._stage.bytes_to_take(tensors)):
            self._preparing = self._start_thread(partial(self._stage.take_memory, tensors))

    def save(
        self, model: nn.Module, optimizer: Optimizer, *, step: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """Begin checkpoint `step`; `state` is whatever else a resumed run wants to see, as JSON.

        Waits for the last save, and logs how long. Without `background`, or room for copies, it returns when the
        checkpoint is there; else the optimizer's next step waits for the copies. Raises CheckpointError, on every rank,
        where the last save failed.
        """
        started = time.monotonic()
        last = self._running
        self.wait()
        if last is not None and (waited := time.monotonic() - started) > _LOGGED:
            self._log(
                f"step {step} waited {waited:.1f} s for checkpoint {last.path.name} to be written, which took "
                f"{last.seconds:.1f} s; save less often, or on faster storage"
            )
        started = time.monotonic()
        if self._preparing is not None:
            self._preparing.join()
        tensors, values = contents_to_save(model, optimizer, self._world)
        if not self._background or not self._hosts_have_room(self._stage.bytes_to_take(tensors)):
            path = save_checkpoint(
                self.root, model, optimizer, self._world, step=step, state=state, keep=self.keep, best=self.best
            )
            seconds = time.monotonic() - started  # training paused for all of them
            size = sum(file.stat().st_size for file in path.iterdir()) if is_first_rank(self._world) else 0
            self.figures = SaveFigures(step, shown_seconds=seconds, seconds=seconds, bytes=size)
            return
        staging = self._stage.begin_copies(tensors, model)
        path = checkpoint_path(self.root, step)
        state = {"step": step, **(state or {})}
        save = self._running = RunningSave(path, state, values, self.keep, staging, started)

        def wait_before_update(*_: Any) -> None:
            # Later updates find the copies taken, so only this one waits.
            handle.remove()
            began = time.monotonic()
            save.staged.wait()
            save.shown += time.monotonic() - began

        handle = optimizer.register_step_pre_hook(wait_before_update)
        self._start_thread(partial(save.run, self._group, self._planner, best=lambda: self.best))
        save.shown = time.monotonic() - started

    @property
    def has_failed(self) -> bool:
        """Whether the save in progress failed on this rank, or is over its limit; `raise_failure` raises it on all."""
        save = self._running
        return save is not None and (save.failure is not None or self._is_over_time_limit(save))

    def raise_failure(self) -> None:
        """Give up the save in progress and raise CheckpointError on all ranks if on any it failed or is over its limit.

        Without a failure nothing changes. After one no save is in progress; threads of it get a moment to end, and if
        some do not, the next checkpoints are written while training waits.
        """
        save = self._running
        if save is None:
            return
        reports = self._world.control.gather_objects(
            (save.phase, save.failure_text, self._is_over_time_limit(save)), "failures of a checkpoint"
        )
        failures = [  # torch names the rank in some of its errors
            text if text.endswith(f"(on rank {rank})") else f"{text} (on rank {rank})"
            for rank, (_, text, _) in zip(self._world.home.ranks, reports, strict=True)
            if text
        ]
        if not failures and not any(over for _, _, over in reports):
            return
        self._running = None
        save.given_up = True
        self._planner = make_save_planner()  # ranks may have kept different plans
        if self._world.control.flag_on_any_rank(not save.ended.wait(_ENDS)):
            self._background = False  # the group may have a message of these threads under way
            self._log(
                "the next checkpoints are written while training waits: the threads of this one have not ended"
            )
        if failures:  # an error of the first rank, which publishes, stands without a number
            reason = failures[0].removesuffix(f" (on rank {self._world.home.ranks[0]})")
        else:
            reason = self._late_save_text([phase for phase, _, _ in reports])
        raise on_all_ranks(CheckpointError(f"checkpoint {save.path} could not be written: {reason}"))

    def _late_save_text(self, phases: Sequence[str]) -> str:
        """Ranks that are still writing come first, then phases of few ranks."""
        ranks_in: dict[str, list[int]] = {}
        for rank, phase in zip(self._world.home.ranks, phases, strict=True):
            ranks_in.setdefault(phase, []).append(rank)
        items = sorted(ranks_in.items(), key=lambda item: (item[0] != "writing its files", len(item[1])))
        phases_text = "; ".join(f"rank(s) {excerpt(ranks)}: {phase}" for phase, ranks in items)
        return f"it has not ended in {self.timeout:g} s: {phases_text}; check the storage"

    def wait(self) -> None:
        """Return when the save in progress is published. Raises CheckpointError, on every rank, if any could not write.

        Raises CommError where a rank is lost.
        """
        save = self._running
        if save is None:
            return
        started = time.monotonic()
        world = self._world
        with world.watch.enter_operation(f"writing of checkpoint {save.path.name}", world.home.ranks, is_work=True):
            while not save.ended.wait(_POLL) and not self._is_over_time_limit(save):
                pass
            if isinstance(save.failure, RuntimeError) and not isinstance(save.failure, LongspanError):
                # The backend raises a RuntimeError where a rank is lost.
                raise save.failure
        self.raise_failure()
        save.shown += time.monotonic() - started
        self._running = None
        self._note_figures(save)

    def take_figures(self) -> SaveFigures | None:
        """Return what the last save took, once, after it is published; None before, and from the second call on."""
        # The save stays until the ranks have agreed that it ended: `wait`.
        save = self._running
        if save is not None and save.ended.is_set() and save.failure is None:
            self._note_figures(save)
        figures = self.figures
        self.figures = None
        return figures

    def activity(self) -> str:
        """What the save in progress is doing, for reports of a failure; "" if there is none."""
        save = self._running
        if save is None or save.ended.is_set():
            return ""
        return f"writing of checkpoint {save.path.name} ({save.phase}) for {time.monotonic() - save.started:.1f} s"

    def give_up(self, seconds: float = 0.0) -> None:
        """Wait for the save in progress no longer than `seconds`, and not for its result.

        With `seconds`, as where this rank is about to leave, it may still be published after that; without, as where a
        rank is lost, it is not any more.
        """
        if self._running is not None:
            self._running.ended.wait(seconds)
            self._running.given_up = seconds == 0
            self._running = None

    def close(self) -> None:
        """Wait for the save in progress and give the memory back; at the latest when the world is left."""
        self.wait()
        if self._preparing is not None:
            self._preparing.join()
        self._background = False
        self._world.watch.background = str
        # A new planner holds no copies.
        self._planner = make_save_planner()
        self._stage.close()

    def _hosts_have_room(self, size: int) -> bool:
        """Entered by all ranks, which agree; `size` are the bytes of this rank's copies. Without room, training waits
        for this and all later saves."""
        reports = self._world.control.gather_objects((gethostname(), size, free_host_bytes()), "room for copies")
        for host in dict.fromkeys(name for name, _, _ in reports):
            total = sum(needed for name, needed, _ in reports if name == host)
            rooms = [free for name, _, free in reports if name == host and free is not None]
            if total and rooms and SPARE * total > min(rooms):
                self._background = False
                self._log(
                    f"training waits while checkpoints are written: host {host} has {min(rooms) / 1e9:.1f} GB free, "
                    f"and copies of its ranks' weights and moments take {total / 1e9:.1f} GB"
                )
                return False
        return True

    def _start_thread(self, work: Callable[[], None]) -> threading.Thread:
        """The thread does not keep the process alive."""
        device = self._world.device

        def run() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            work()

        thread = threading.Thread(target=run, name="longspan save", daemon=True)
        thread.start()
        return thread

    def _is_over_time_limit(self, save: RunningSave) -> bool:
        return not save.ended.is_set() and time.monotonic() - save.started > self.timeout

    def _note_figures(self, save: RunningSave) -> None:
        if not save.has_figures:
            save.has_figures = True
            self.figures = SaveFigures(save.state["step"], save.shown, save.seconds, save.bytes)

"""One save in its thread: the copies, the files, their publication by agreement of all ranks' threads, and pruning.

`saver.py` starts it and raises what goes wrong. All that the threads say to each other goes over one gloo group of
theirs. torch's `_DistWrapper` tells an error of one rank to all of them.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper  # pyright: ignore[reportPrivateUsage]

from longspan.checkpoint.files import (
    Digest,
    create_partial,
    is_unfinished,
    partial_path,
    publish_checkpoint,
    remove_folder,
    remove_old_checkpoints,
)
from longspan.checkpoint.save_plan import CachedPlanner, PlanCache, names_digest
from longspan.checkpoint.stage import StagedTensors
from longspan.checkpoint.storage import HashingWriter, first_failure_text
from longspan.errors import CheckpointError, LongspanError


class RunningSave:
    """A save in progress. Its thread sets what the main thread reads: `phase`, `failure`, `staged` and `ended`."""

    def __init__(self, path: Path, state: dict[str, Any], keep: int, staging: StagedTensors, started: float) -> None:
        self.path, self.state, self.keep, self.staging, self.started = path, state, keep, staging, started
        self.phase = "copying to the host"
        self.failure: BaseException | None = None
        self.shown = self.seconds = 0.0  # seconds that training stood for it, and until it ended
        self.bytes = 0  # of all ranks' files
        self.given_up = False  # nobody waits for it any more, and it is not published
        self.noted = False  # its figures are in the metrics, or about to be
        self.staged, self.ended = threading.Event(), threading.Event()

    @property
    def folder(self) -> Path:
        """The folder that is written into."""
        return partial_path(self.path)

    @property
    def failure_text(self) -> str:
        """Return the failure as a message has it; "" for none."""
        if self.failure is None:
            return ""
        if isinstance(self.failure, (CheckpointException, LongspanError)):
            return first_failure_text(self.failure)
        return f"{type(self.failure).__name__}: {self.failure}"

    def run(self, group: ProcessGroup, plans: PlanCache, *, best: Callable[[], int]) -> None:
        """Copy, write and publish the checkpoint, and remove older ones, in the threads of all ranks of a group.

        `best` returns the step of one more checkpoint to keep; it is called last, for training may have changed it. An
        error is not raised here, but noted in `failure`.
        """
        collectives = _DistWrapper(group, True, 0)  # torch's, of objects; rank 0 of the group coordinates
        try:
            self._write_on_all_ranks(collectives, group, plans)
            if collectives.is_coordinator:
                self.phase = "removing older checkpoints"
                remove_old_checkpoints(self.path.parent, self.keep, best=best())
        except BaseException as error:  # raised where the ranks meet next
            self.failure = error
            # In a store this folder is the checkpoint's own, and stays if it was published.
            if collectives.is_coordinator and is_unfinished(self.folder):
                remove_folder(self.folder)  # what it takes may be what the disk lacks
        finally:
            self.seconds = time.monotonic() - self.started
            self.staged.set()
            self.ended.set()

    def _write_on_all_ranks(self, collectives: _DistWrapper, group: ProcessGroup, plans: PlanCache) -> None:
        """Write the checkpoint in steps that all ranks' threads take together: copy, agree on names, write, publish.

        A failure of any rank in a step is raised on all, so that nothing is published that is not whole.
        """
        writer, tensors = _Writer(self), self.staging.tensors

        def finish_copies() -> None:
            self.staging.finish()
            self.staged.set()
            self.phase = "waiting for the other ranks' copies"

        def publish(digests: list[dict[str, Digest]]) -> int:
            """Publish what all ranks have written, and return its bytes. Raises CheckpointError for a save that was
            given up.
            """
            self.phase = "publishing"
            if self.given_up:
                raise CheckpointError(f"{self.folder} came too late")
            publish_checkpoint(self.folder, self.path, self.state, digests)
            return sum(size for files in digests for size, _ in files.values())

        collectives.all_reduce("copy", finish_copies, lambda _: create_partial(self.folder))
        self.phase = "planning"
        digests = collectives.all_gather("names", partial(names_digest, tensors))
        is_first = digests.index(digests[collectives.rank]) == collectives.rank  # of the ranks with the same names
        dcp.save(
            tensors,
            storage_writer=writer,
            planner=CachedPlanner(plans, lists_values=is_first),
            process_group=group,
        )
        self.bytes = collectives.all_reduce("publish", lambda: writer.digests, publish)


def connect_ranks(group: ProcessGroup) -> None:
    """Send each kind of message of a save once, with empty values, so that gloo connects the ranks of the group now.

    gloo finds its peers through the launcher's store. Ranks whose launcher was killed save once more, when that store
    is gone.
    """
    collectives = _DistWrapper(group, True, 0)
    collectives.all_gather("connecting", str)
    collectives.all_reduce("connecting", str, len)
    collectives.reduce_scatter("connecting", str, list)


class _Writer(HashingWriter):
    """Writes this rank's files in the saving thread."""

    def __init__(self, save: RunningSave) -> None:
        super().__init__(save.folder, None)
        self._save = save

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the tensors as torch's writer does; the other ranks are waited for under the save's own limit."""
        self._save.phase = "writing its files"
        written = FileSystemWriter.write_data(self, plan, planner)
        self._save.phase = "waiting for the other ranks' files"
        return written

"""The folder of a run: its lock, run.lock, which keeps a second run out, and whether its disks have room for the
checkpoints and the model, before step 1.
"""

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from longspan.checkpoint.files import complete_checkpoints
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.errors import ConfigError, RunFolderError, plural
from longspan.files import name_file_in_errors
from longspan.model.weights.hf_folder import read_configuration
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import bytes_text
from longspan.run.facts import LOCK
from longspan.run.run_data import TrainingRun
from longspan.train.optim.state_numbers import optimizer_state_numbers


@contextmanager
def run_lock(directory: Path, world: World, log: LogLine) -> Iterator[None]:
    """Hold the lock of a run's folder, which is made if it is not there; entered by all ranks, of which the first holds
    it.

    Raises RunFolderError on every rank if another process holds it. A folder that was made here is removed after an
    error, unless it has run.json or checkpoints by then. (It has checkpoints alone if it was removed during the run,
    and a later save has made it again.)
    """
    to_remove = is_first_rank(world) and not directory.exists()
    file = run_on_every_rank(
        world, lambda: _lock_file(directory, log) if is_first_rank(world) else None, RunFolderError
    )
    try:
        yield
        to_remove = False
    finally:
        if file is not None:
            with suppress(OSError):
                _write_holder(file, "")
                file.close()
        if to_remove and not any((directory / name).exists() for name in ("run.json", "checkpoints")):
            shutil.rmtree(directory, ignore_errors=True)


def _lock_file(directory: Path, log: LogLine) -> TextIO:
    """The file stays open. A file system without locks is only logged."""
    directory.mkdir(parents=True, exist_ok=True)
    _refuse_links(directory)
    path = directory / LOCK
    file = path.open("a+", encoding="utf-8")
    try:
        with name_file_in_errors(path):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
            raise RunFolderError(
                f"another run is at work in {directory}: {holder}; wait until it has ended, stop it, or set run.dir to "
                "another folder"
            ) from error
        log(f"{path} cannot be locked ({error.strerror}): a second run in this folder would not be noticed")
    with suppress(OSError):  # a full disk: what counts is the lock
        _write_holder(file, f"process {os.getpid()} on {socket.gethostname()}")
    return file


def _write_holder(file: TextIO, holder: str) -> None:
    """A file that has another name too (a hard link) stays as it is."""
    if os.fstat(file.fileno()).st_nlink == 1:
        file.truncate(0)
        file.write(holder)
        file.flush()


# The names of entries of these folders can be foreseen, too.
_FOLDERS = ("evaluation", "profile", "memory")


def _refuse_links(directory: Path) -> None:
    """A run would write through a link into somebody's other file; `refuse_linked_root` refuses that of checkpoints."""
    for folder in (directory, *(directory / name for name in _FOLDERS)):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_symlink() and path != directory / "checkpoints":
                raise RunFolderError(
                    f"{path} is a link (to {path.readlink()}), and a run writes nothing outside its folder; put a "
                    "copy in its place, remove it, or set run.dir to another folder"
                )


def check_free_disk(run: TrainingRun, log: LogLine) -> None:
    """Compare the free bytes of the run's disks with those of RUN/model, and of the checkpoints that it is to hold at
    once; entered by all ranks.

    Raises ConfigError, on every rank, for too little room; with `checkpoint.allow_little_disk` that is only logged.
    """
    bytes_of_ranks = run.world.control.gather_objects(_local_bytes(run), "bytes of a checkpoint")
    checkpoint_bytes, model_bytes = (
        int(sum(sizes) / run.world.home.dp_replicate) for sizes in zip(*bytes_of_ranks, strict=True)
    )
    # the first rank sees the disks as the others do
    compare = partial(_compare_with_free_bytes, run, checkpoint_bytes, model_bytes, log)
    run_on_first_rank(run.world, compare, ConfigError)


def _local_bytes(run: TrainingRun) -> tuple[float, int]:
    """(bytes of a checkpoint, bytes of RUN/model) that this rank's part of the parameters makes."""
    config = run.config
    lora = config.lora.rank > 0
    numbers = optimizer_state_numbers(replace(config.optimizer, moments=""), lora=lora, dtype=config.model.dtype)
    groups = run.optimizer.param_groups
    # muon has one moment of these, and a second one of all other parameters
    matrices = {p for group in groups if group.get("is_matrix") for p in group["params"]}
    # `save_final_model` writes this type.
    saved_dtype: Any = None if lora else read_configuration(run.dir).dtype
    checkpoint_bytes = 0.0
    model_bytes = 0
    for parameter in run.model.parameters():
        if parameter.requires_grad or not lora:
            local = local_tensor(parameter.detach())
            # moments in eight bits are saved in bfloat16
            state_bytes = 2 if config.optimizer.moments else local.dtype.itemsize
            numbers_per_weight = numbers + 1 if matrices and parameter not in matrices else numbers
            checkpoint_bytes += local.nbytes
            if parameter.requires_grad:
                checkpoint_bytes += local.numel() * numbers_per_weight * state_bytes
            model_bytes += local.numel() * (saved_dtype or local.dtype).itemsize
    return checkpoint_bytes, model_bytes


def _compare_with_free_bytes(run: TrainingRun, checkpoint_bytes: int, model_bytes: int, log: LogLine) -> None:
    """With `checkpoint.allow_little_disk` it only logs. At once there are the newest checkpoints that are kept, the
    best, and the one that is being written, as far as the steps that are left make so many. Saves by the clock
    may make more; that these have no room is only logged."""
    settings = run.config.checkpoint

    def refuse_or_log(text: str) -> None:
        if not settings.allow_little_disk:
            raise ConfigError(f"{text}; checkpoint.allow_little_disk = true trains all the same")
        log(text)

    folder = next(path for path in (run.checkpoints, *run.checkpoints.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    # RUN/model is on the disk of the checkpoints.
    model_bytes_beside = model_bytes
    if folder.stat().st_dev != run.dir.stat().st_dev:
        model_bytes_beside = 0
        if (free_in_run_dir := shutil.disk_usage(run.dir).free) < model_bytes:
            refuse_or_log(
                f"the model that a run saves at its end takes {bytes_text(model_bytes)}, and {run.dir} has "
                f"{bytes_text(free_in_run_dir)} free; make room, or set run.dir to another disk"
            )
    there = len(complete_checkpoints(run.checkpoints))
    steps = run.config.train.steps - run.done
    to_come = -(-steps // settings.every) if settings.every else 1
    most = to_come
    if settings.save_total_limit:
        kept = settings.save_total_limit + (1 if settings.keep_best else 0)
        most = max(1, kept + 1 - there)
    needed = min(to_come, most)
    most_by_clock = most if settings.minutes else needed
    room = max(0, free - model_bytes_beside)
    if room >= most_by_clock * checkpoint_bytes:
        return
    is_short = room < needed * checkpoint_bytes
    model_text = f", RUN/model {bytes_text(model_bytes_beside)}" if model_bytes_beside else ""
    text = (
        f"a checkpoint takes {bytes_text(checkpoint_bytes)}{model_text}, and {folder} has {bytes_text(free)} free, for "
        f"{room // checkpoint_bytes} of {plural(needed if is_short else most_by_clock, 'more checkpoint')} at once "
        f"({there} are there); make room, lower checkpoint.save_total_limit, or set checkpoint.dir to another disk"
    )
    if is_short:
        refuse_or_log(text)
    else:
        log(text)

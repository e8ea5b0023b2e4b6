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
from pathlib import Path
from typing import Any, TextIO

import torch

from longspan.checkpoint.files import complete_checkpoints
from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank, run_on_first_rank
from longspan.errors import ConfigError, RunFolderError, plural
from longspan.files import name_file_in_errors, read_json
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import bytes_text
from longspan.run.facts import LOCK
from longspan.run.run_data import TrainingRun
from longspan.train.optim.state_numbers import optimizer_state_numbers


@contextmanager
def run_lock(directory: Path, world: World, log: LogLine) -> Iterator[None]:
    """Hold the lock of a run's folder, creating the folder if needed; entered by all ranks.

    Raises RunFolderError on every rank if another process holds it. A new folder goes where an error comes before
    run.json, unless it has checkpoints: a folder that was removed meanwhile, into which the run has saved again.
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
                file.truncate(0)
                file.close()
        if to_remove and not any((directory / name).exists() for name in ("run.json", "checkpoints")):
            shutil.rmtree(directory, ignore_errors=True)


def _lock_file(directory: Path, log: LogLine) -> TextIO:
    """Make a run's folder and lock its run.lock, which then names this process; returns the file, which stays open.

    Raises RunFolderError where another process has the lock. A file system without locks is only logged.
    """
    directory.mkdir(parents=True, exist_ok=True)
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
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file


def check_free_disk(run: TrainingRun, log: LogLine) -> None:
    """Compare the disk's free bytes with those of RUN/model, and of the checkpoints that it is to hold at once; entered
    by all ranks.

    These are the newest that are kept, the best, and the one that is written, as far as the steps that are left make so
    many; saves by the clock may make more, which is only logged. Raises ConfigError, on every rank, for too little room
    without `checkpoint.allow_little_disk`.
    """
    config = run.config
    settings = config.checkpoint
    lora = config.lora.rank > 0
    numbers = optimizer_state_numbers(replace(config.optimizer, moments=""), lora=lora, dtype=config.model.dtype)
    groups = run.optimizer.param_groups
    # of muon, which has a second moment of the others
    matrices = {p for group in groups if group.get("is_matrix") for p in group["params"]}
    # as in `save_final_model`
    saved_dtype: Any = None if lora else getattr(torch, read_json(run.dir / "config.json")["dtype"])
    local_bytes = 0.0
    local_model = 0
    for parameter in run.model.parameters():
        if parameter.requires_grad or not lora:
            local = local_tensor(parameter.detach())
            # moments in eight bits are saved in bfloat16
            state_bytes = 2 if config.optimizer.moments else local.dtype.itemsize
            numbers_per_weight = numbers + 1 if matrices and parameter not in matrices else numbers
            local_bytes += local.nbytes
            if parameter.requires_grad:
                local_bytes += local.numel() * numbers_per_weight * state_bytes
            local_model += local.numel() * (saved_dtype or local.dtype).itemsize
    bytes_of_ranks = run.world.control.gather_objects((local_bytes, local_model), "bytes of a checkpoint")
    size, model = (int(sum(sizes) / run.world.home.dp_replicate) for sizes in zip(*bytes_of_ranks, strict=True))

    def refuse_or_log(text: str) -> None:
        if not settings.allow_little_disk:
            raise ConfigError(f"{text}; checkpoint.allow_little_disk = true trains all the same")
        log(text)

    def compare_bytes() -> None:
        """Compare on the first rank, which sees the run's disks as the others do."""
        folder = next(path for path in (run.checkpoints, *run.checkpoints.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free
        beside = model
        if folder.stat().st_dev != run.dir.stat().st_dev:
            beside = 0
            if (free_there := shutil.disk_usage(run.dir).free) < model:
                refuse_or_log(
                    f"the model that a run saves at its end takes {bytes_text(model)}, and {run.dir} has "
                    f"{bytes_text(free_there)} free; make room, or set run.dir to another disk"
                )
        there = len(complete_checkpoints(run.checkpoints))
        steps = config.train.steps - run.done
        to_come = -(-steps // settings.every) if settings.every else 1
        most = max(1, settings.save_total_limit + bool(settings.keep_best) + 1 - there)
        if not settings.save_total_limit:
            most = to_come
        needed = min(to_come, most)
        most_checkpoints = most if settings.minutes else needed
        room = max(0, free - beside)
        if room >= most_checkpoints * size:
            return
        model_text = f", RUN/model {bytes_text(beside)}" if beside else ""
        count = needed if room < needed * size else most_checkpoints
        (refuse_or_log if room < needed * size else log)(
            f"a checkpoint takes {bytes_text(size)}{model_text}, and {folder} has {bytes_text(free)} free, for "
            f"{room // size} of {plural(count, 'more checkpoint')} at once ({there} are there); make room, lower "
            "checkpoint.save_total_limit, or set checkpoint.dir to another disk"
        )

    run_on_first_rank(run.world, compare_bytes, ConfigError)

"""Whether the disks of a run have room for its checkpoints and its model, before step 1."""

import shutil
from dataclasses import replace
from typing import Any

import torch

from longspan.checkpoint.files import complete_checkpoints
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.errors import ConfigError, plural
from longspan.files import read_json
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import bytes_text
from longspan.run.run_data import TrainingRun
from longspan.train.optim.state_numbers import optimizer_state_numbers


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
    saved_dtype: Any = (
        None if lora else getattr(torch, read_json(run.dir / "config.json")["dtype"])
    )  # as in `save_final_model`
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

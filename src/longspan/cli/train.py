"""`longspan train`: check the configuration, start the ranks, train, write the report, print the result."""

import gc
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.cli.flags import check_flags_at_least
from longspan.cli.processes import (
    choose_processes,
    compile_attention_ahead,
    count_host_ranks,
    count_ranks,
    has_torchrun,
    print_note,
    prints_results,
    run_on_ranks,
)
from longspan.cli.train_flags import parse_train
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.errors import LongspanError
from longspan.launch.output import keep_prints_from_failing
from longspan.launch.stop_signals import NOTICES, Interrupted, block_signals, ignore_signals
from longspan.resolve.planner_config import home_of
from longspan.run.checks import check_config, check_data, check_paths_exist
from longspan.run.loggers import check_wandb_login
from longspan.train.start.gpu_imports import begin_gpu_imports
from longspan.train.start.start_times import Starts

if TYPE_CHECKING:
    from longspan.run.facts import TrainResult


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns 0 when the run came to its end, `checkpoint.preempted_exit_code` when it was told to
    stop."""
    starts = Starts()
    flags, config = parse_train(argv)
    save_on = [number for number in NOTICES if number.name in config.checkpoint.save_signals]
    if save_on:
        # The signals are ignored until there is a step to save.
        ignore_signals(save_on)
    if flags.dry_run:
        from longspan.cli.plans.answer import show_dry_run

        ranks = count_ranks(flags.world, flags.device)
        return show_dry_run(config, ranks=ranks, on_gpus=flags.device != "cpu", as_json=flags.json)
    if flags.show:
        from longspan.cli.show import show_rows

        check_flags_at_least(flags, show=0)
        check_data(config)
        check_paths_exist(config)
        if prints_results():
            show_rows(config, flags.show)
        return 0
    keep_prints_from_failing(Path(config.run.dir))
    processes = choose_processes(flags.world, flags.device)
    ranks = processes.ranks
    # torchrun's ranks run already: they find a missing path themselves.
    if not has_torchrun():
        check_data(config)
        check_paths_exist(config)
    with processes.add_note_to_errors():
        check_config(config, ranks)
    if "wandb" in config.run.loggers and prints_results():  # here the first rank runs, which has the loggers
        check_wandb_login(os.environ)
    print_note(processes.note, sys.stderr if flags.json else sys.stdout)
    starts.end_part("command")
    args = (config, ranks, processes.backend, flags.json, starts)
    try:
        with compile_attention_ahead(config, processes, backward=True):
            result: TrainResult = run_on_ranks(train_rank, args, ranks, ignored=save_on)
    except Interrupted as interrupted:
        # A signal came before the run heeds signals, or a second one.
        interrupted.status = config.checkpoint.preempted_exit_code or interrupted.status
        raise
    if prints_results():
        _report_result(result, config, as_json=flags.json)
    return config.checkpoint.preempted_exit_code if result.stopped else 0


def train_rank(
    rank: int, config: RunConfig, ranks: int, backend: str, to_stderr: bool, starts: Starts
) -> "TrainResult":
    """Train on one rank; the first rank's progress goes to standard output, or with `to_stderr` to standard error.
    `starts` has the seconds of the command's start so far. Where a rank runs out of memory in the warm-up, all ranks
    leave their world and begin anew with half of the rows that "auto" had chosen.
    """
    starts.end_part("processes")
    keep_prints_from_failing(Path(config.run.dir))
    if backend == "nccl":
        begin_gpu_imports(count_host_ranks(ranks), compiled=config.train.compile != "none")
    # these imports, which only torchrun's ranks have still to make, leave no garbage: to look for it takes a tenth of
    # the time
    gc.disable()
    try:
        # Some imports catch every exception, and that of a signal with them.
        with block_signals():
            import torch

            from longspan.comm import World
            from longspan.resolve.kept_rows import halve_kept_rows, ran_short_of_memory
            from longspan.run.loop import train
            from longspan.run.progress import ProgressDisplay
    finally:
        gc.freeze()  # nor is any looked for later among what was imported
        gc.enable()
    starts.end_part("imports")

    home = home_of(config.parallel, ranks)
    stream = (sys.stderr if to_stderr else sys.stdout) if rank == 0 else None
    while True:
        try:
            with World(home, backend=backend, timeout=config.run.timeout_seconds) as world:
                starts.end_part("groups")
                with ProgressDisplay(config.train.steps, stream, log_every=config.run.log_every) as display:
                    return train(config, world, display, starts)
        except LongspanError as error:
            if config.context.max_tokens_per_slot != AUTO or not ran_short_of_memory(error):
                raise
        if rank == 0:
            halve_kept_rows(config)
        gc.collect()  # the model, its optimizer and their tensors are in cycles
        torch.cuda.empty_cache()


def _report_result(result: "TrainResult", config: RunConfig, *, as_json: bool) -> None:
    """JSON is alone on standard output."""
    from longspan.report import write_report

    out = sys.stderr if as_json else sys.stdout
    report = write_report(result.dir)
    saved = "adapter, for stock peft" if config.lora.rank else "Hugging Face folder"
    model = "" if result.stopped else f", {saved}: {result.dir / 'model'}"
    print(f"checkpoints: {config.checkpoint.dir or result.dir / 'checkpoints'}{model}", file=out)
    print(json.dumps(result.summary()) if as_json else result.text())
    compared = " --compare base" if config.lora.rank else ""
    command = "longspan" if shutil.which("longspan") else Path(sys.executable).with_name("longspan")
    # A run without final losses holds out no documents.
    rows = "" if result.final else " --data ROWS"
    following = "" if result.stopped else f"; next: {command} eval {result.dir}{rows}{compared}"
    print(f"{result.degrees_text()}Open {report}{following}", file=out)

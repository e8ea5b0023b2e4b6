"""`longspan eval`: the loss of a checkpoint on its run's held-out documents, at any degree, on any number of ranks."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.cli.flags import parse_eval
from longspan.cli.processes import processes_of, reports_here, run_on_ranks, say
from longspan.errors import CheckpointError, counted
from longspan.train.checkpoint.files import step_of
from longspan.train.config.file import load_config
from longspan.train.config.sections import RunConfig
from longspan.train.json_record import as_json
from longspan.train.run.config_check import check_config

if TYPE_CHECKING:
    from longspan.train.evaluation.result import Evaluation


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    flags = parse_eval(argv)
    run_dir, checkpoint = split_target(Path(flags.run))
    config = load_config(run_dir / "config.toml")
    flags = parse_eval(argv, config.context)
    config = replace(config, context=flags.context, run=replace(config.run, dir=str(run_dir)))
    processes = processes_of(flags.world, flags.device)
    ranks = processes.ranks
    check_config(config, ranks, training=False)
    say(processes.note, sys.stderr)
    args = (config, checkpoint, ranks, processes.backend)
    result: Evaluation = run_on_ranks(eval_rank, args, ranks, compile_cache=config.run.compile_cache)
    if reports_here():
        print(as_json(result.row() | {"world": ranks}) if flags.json else _text(result, ranks))
    return 0


def split_target(target: Path) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint in it where one was named. Raises CheckpointError where there is none."""
    is_checkpoint = step_of(target) >= 0
    run_dir = target.resolve().parent.parent if is_checkpoint else target
    if not target.is_dir():
        what = "checkpoint" if is_checkpoint else "run"
        raise CheckpointError(f"there is no {what} {target}; give a run's folder, or RUN/checkpoints/step-NNNNNN")
    if not (run_dir / "config.toml").is_file():
        raise CheckpointError(f"{run_dir} is not the folder of a run: it has no config.toml")
    return run_dir, target if is_checkpoint else None


def eval_rank(rank: int, config: RunConfig, checkpoint: Path | None, ranks: int, backend: str) -> "Evaluation":
    """What one rank does."""
    from longspan.comm import World
    from longspan.train.run.setup import evaluate_checkpoint

    home = check_config(config, ranks, training=False)
    log = partial(print, file=sys.stderr) if rank == 0 else _silent
    with World(home, backend=backend, timeout=config.run.timeout_seconds) as world:
        return evaluate_checkpoint(config, checkpoint, world, log)


def _text(result: "Evaluation", ranks: int) -> str:
    return (
        f"step {result.step}: evaluation loss {result.loss:.9f} at cp {result.cp} on {counted(ranks, 'rank')} "
        f"({counted(result.documents, 'document')}, {counted(result.tokens, 'token')}, {result.seconds:.1f} s)"
    )


def _silent(text: str) -> None:
    pass

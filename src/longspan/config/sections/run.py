"""The section [run] of a configuration: the folder of a run. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from longspan.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class RunSection:
    """The run's folder and how it behaves."""

    dir: str = "runs/first"
    """Folder of the run: config, corpus, metrics, plans, checkpoints, report."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the newest good checkpoint; never: refuse a folder that holds one; must: refuse one without."""
    keep_checkpoints: NonNegativeInt = 2
    """Newest good checkpoints that are kept; 0: all."""
    compile_cache: str = ""
    """Folder where kernels compiled for GPUs are kept for later runs; empty: longspan/kernels in the user's cache."""
    loggers: tuple[str, ...] = ()
    """Where rows of metrics go too: tensorboard, wandb (extras), or a class of your own by its dotted name."""
    log_every: PositiveInt = 10
    """Where the output is no terminal, a line of progress every so many steps; one comes every 30 seconds in any
    case."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a rank waits for the others before it says which one is missing."""
    stopped_status: NonNegativeInt = 0
    """Exit status of longspan train when a signal stopped it before its last step, such as 75 for a scheduler that then
    starts it again; the launcher torchrun ends with 1 where any process ends with another status than 0."""

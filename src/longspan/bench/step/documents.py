"""Which documents `longspan bench step` times: lengths from flags, or those of the first step of a run."""

from dataclasses import dataclass
from pathlib import Path

from longspan.bench.step.flags import StepFlags
from longspan.cli.plans.lengths import read_lengths
from longspan.config.defaults import resolve_defaults
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError

CPU_LENGTHS = (96, 40, 24, 16, 16)


@dataclass(frozen=True)
class StepDocuments:
    """Lengths of documents, where they came from, and whether they were listed as numbers."""

    lengths: tuple[int, ...]
    source: str
    listed: bool = False


def read_documents(flags: StepFlags, config: RunConfig, slots: int, *, gpu: bool) -> StepDocuments:
    """Read the documents that flags name, or those of a run's first step; on CPUs there is a default.

    Raises ConfigError where there are none, and for flags that contradict each other.
    """
    entries = (flags.sequences or flags.lengths).split(",")
    are_numbers = all(entry.strip().isdecimal() for entry in entries)  # --lengths may name a file instead
    has_source = flags.data or flags.distribution or flags.same
    if flags.sequences and not are_numbers:
        raise ConfigError(f"--sequences {flags.sequences!r} is not a list of lengths such as 16384,65536")
    if flags.sequences and (has_source or flags.lengths):
        raise ConfigError("--sequences are timed one after another; leave --lengths and other documents out")
    if are_numbers and not has_source:
        return StepDocuments(tuple(map(int, entries)), "given", listed=True)
    if flags.lengths or has_source:
        return StepDocuments(*read_lengths(flags, slots))
    if flags.config:
        return _read_first_step(config)
    if not gpu:
        return StepDocuments(CPU_LENGTHS, "given")
    raise ConfigError("give documents: --lengths 65536, --lengths FILE.json, --distribution lognorm, --data or --same")


def _read_first_step(config: RunConfig) -> StepDocuments:
    """Read the documents of a run's first step, whose lengths its corpus tells."""
    from longspan.data.documents import Corpus
    from longspan.train.plans.order import make_step_order

    folder, config = Path(config.run.dir), resolve_defaults(config)
    if not (folder / "corpus" / "corpus.json").is_file():
        raise ConfigError(
            f"{folder} has no corpus yet, whose first step would be timed; give documents (--lengths, --distribution, "
            "--data or --same), or train the run first"
        )
    lengths = make_step_order(config, Corpus(folder / "corpus")).lengths_of_step(0)
    return StepDocuments(tuple(lengths), f"step 1 of {folder}")

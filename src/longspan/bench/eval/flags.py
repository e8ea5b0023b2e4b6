"""Flags of `longspan bench eval`, and what its ranks are told."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.bench.eval.cases import KNOWN_DOCUMENTS, VOCABULARY, Case, cases_of
from longspan.bench.flags import BenchFlags
from longspan.cli.flags import Switch, check_least
from longspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvalBenchFlags(BenchFlags):
    """Time the evaluation of four documents at degrees 1 and 2, and under a plan that chooses, on the same weights.

    A case is a number of tokens of each document, a number of layers of a Qwen3-4B shape, and degrees of tensor and
    pipeline parallelism. Its model is prepared as for training, with FSDP2. A training step at degree 1 goes before
    evaluations at 1 and at 2, and one at degree 2 before evaluations at 2 and at 1. At a fixed degree each group of
    slots has one document in a micro-batch, as published figures count; the planned evaluation is longspan's own
    choice. Every evaluation holds each document once. Cases that need another number of GPUs are left out by name.

    Runs one process for each GPU of this machine, or torchrun's, or --world local processes.
    """

    cases: str = ""
    """Names of cases, with commas between; empty: all on GPUs, tiny ones on CPUs."""
    documents: int = KNOWN_DOCUMENTS
    """Documents of an evaluation."""
    layers: int = 0
    """Number of layers in place of the cases'; 0: theirs."""
    tokens: int = 0
    """Tokens of each document in place of the cases'; 0: theirs."""
    preset: str = ""
    """Preset that gives the model its shape, in place of qwen3-4b."""
    vocabulary: int = VOCABULARY
    """Rows of the embedding and of the head."""
    cp_comm_type: str = "auto"
    """How the slots of a group share attention."""
    profile: Switch = False
    """Profile one more evaluation at each degree: the parts of its time are in the record."""
    warmup: int = 3
    """Evaluations before the timed ones."""
    repeats: int = 10
    """Timed evaluations."""
    timeout_seconds: float = 300.0
    """How long a rank waits for the others."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the ranks are told."""

    flags: EvalBenchFlags
    cases: tuple[Case, ...]  # that these ranks can run
    left_out: tuple[Case, ...]
    ranks: int
    backend: str
    command: str

    @property
    def gpu(self) -> bool:
        """Whether each rank has a GPU."""
        return self.backend != "gloo"

    @property
    def out(self) -> str:
        """Where the first rank keeps what it has so far; "": nowhere."""
        return str(Path(self.flags.out).resolve()) if self.flags.out else ""

    def to_json(self) -> dict[str, Any]:
        """What a record says of them."""
        names = ("documents", "vocabulary", "cp_comm_type", "warmup", "repeats")
        return {
            **{name: getattr(self.flags, name) for name in names},
            "ranks": self.ranks,
            "command": self.command,
            "left_out": [case.name for case in self.left_out],
        }


def make_settings(flags: EvalBenchFlags, ranks: int, backend: str, command: Sequence[str]) -> Settings:
    """What the ranks are told. Raises ConfigError for cases that are not there, and where no case can run."""
    flags.check_runs()
    check_least(flags, documents=1, layers=0, tokens=0, vocabulary=8)
    changes = {"preset": flags.preset, "layers": flags.layers, "tokens": flags.tokens}
    cases = cases_of(flags.cases, gpu=backend != "gloo", **changes)
    run = tuple(case for case in cases if case.runs_on(ranks))
    if not run:
        need = ", ".join(f"{case.name} {case.ranks}" for case in cases)
        raise ConfigError(f"none of the cases runs on {ranks} ranks; they need multiples of: {need}")
    left_out = tuple(case for case in cases if case not in run)
    command = " ".join(command)
    return Settings(flags=flags, cases=run, left_out=left_out, ranks=ranks, backend=backend, command=command)

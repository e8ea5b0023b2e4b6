"""The cases of `evaluation_degrees.py` (documents, a model's sizes, its placement), its flags and settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.bench.benches import BenchFlags
from longspan.cli.flags import check_least
from longspan.errors import ConfigError
from longspan.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


DEGREES = (1, 2)
KNOWN_DOCUMENTS, KNOWN_RANKS = 4, 8  # of the published figures, on 8 × H100
VOCABULARY = 10240  # of the published figures: a tokenizer of 10,000 ids, an untied head


@dataclass(frozen=True, kw_only=True)
class EvaluationCase:
    """Equal documents through a model of a preset with so many layers, on `tp` x `pp` ranks a slot.

    `known` are milliseconds at degrees 1 and 2 that were published for KNOWN_DOCUMENTS on KNOWN_RANKS.
    """

    name: str
    tokens: int
    layers: int
    tp: int = 1
    pp: int = 1
    preset: str = "qwen3-4b"
    known: tuple[float, float] | None = None

    @property
    def ranks(self) -> int:
        """The fewest ranks that it runs on, one slot; more must be a multiple, and of two slots for degree 2."""
        return self.tp * self.pp

    def runs_on(self, ranks: int) -> bool:
        """Whether so many ranks are whole slots of this case."""
        return ranks % self.ranks == 0

    def degrees(self, ranks: int) -> tuple[int, ...]:
        """The degrees that divide the slots of so many ranks."""
        return tuple(degree for degree in DEGREES if ranks // self.ranks % degree == 0)

    def home(self, ranks: int) -> Layout:
        """The home of its model on so many ranks."""
        return Layout(ranks, tp=self.tp, pp=self.pp)

    def configuration(self, vocabulary: int) -> "PreTrainedConfig":
        """The model's configuration, with an untied head. Raises ModelError for an unknown preset."""
        from longspan.bench.layers import change_layer_count
        from longspan.model.presets import preset_config

        configuration = change_layer_count(preset_config(self.preset, vocab_size=vocabulary), self.layers)
        configuration.vocab_size, configuration.tie_word_embeddings = vocabulary, False
        return configuration


CASES = (
    EvaluationCase(name="1k-tp2", tokens=1024, layers=4, tp=2, known=(8.9, 12.4)),
    EvaluationCase(name="8k-tp2", tokens=8192, layers=8, tp=2, known=(26.3, 21.3)),
    EvaluationCase(name="1k-tp1", tokens=1024, layers=4),
    EvaluationCase(name="8k-tp1", tokens=8192, layers=8),
    EvaluationCase(name="8k-pp2", tokens=8192, layers=8, pp=2),
    EvaluationCase(name="16k-pp2", tokens=16384, layers=8, pp=2),
    EvaluationCase(name="8k-tp2-pp2", tokens=8192, layers=8, tp=2, pp=2, known=(39.5, 32.2)),
    EvaluationCase(name="8k-pp4", tokens=8192, layers=8, pp=4, known=(53.1, 32.3)),
    EvaluationCase(name="16k-tp2-pp2", tokens=16384, layers=8, tp=2, pp=2, known=(82.5, 46.5)),
    EvaluationCase(name="16k-pp4", tokens=16384, layers=8, pp=4, known=(117.7, 62.8)),
)
TINY_CASES = (
    EvaluationCase(name="tiny-tp2", tokens=48, layers=2, tp=2, preset="qwen3-tiny"),
    EvaluationCase(name="tiny-pp2", tokens=48, layers=2, pp=2, preset="qwen3-tiny"),
)


def cases_of(
    names: str, *, gpu: bool, preset: str = "", layers: int = 0, tokens: int = 0
) -> tuple[EvaluationCase, ...]:
    """The cases with these names (commas between; "": all of a GPU, or the tiny ones), with these changes.

    Published figures belong only to unchanged cases. Raises ConfigError for a name that is not there.
    """
    by_name = {case.name: case for case in (*CASES, *TINY_CASES)}
    default = CASES if gpu else TINY_CASES
    chosen = [word.strip() for word in names.split(",") if word.strip()] or [case.name for case in default]
    if unknown := [name for name in chosen if name not in by_name]:
        raise ConfigError(f"--cases has {', '.join(unknown)}; cases are {', '.join(by_name)}")
    settings = {"preset": preset, "layers": layers, "tokens": tokens}
    changes: dict[str, Any] = {name: value for name, value in settings.items() if value}
    if changes:
        changes["known"] = None
    return tuple(replace(by_name[name], **changes) for name in chosen)


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
    compiled: str = "auto"
    """Whether layers are compiled, as `train.compiled`; auto: as a run of `longspan train` has them."""
    profile: bool = False
    """Profile one more evaluation at each degree: the parts of its time are in the record."""
    warmup: int = 3
    """Evaluations before the timed ones."""
    repeats: int = 10
    """Timed evaluations."""
    timeout_seconds: float = 300.0
    """How long a rank waits for the others."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What the ranks measure."""

    flags: EvalBenchFlags
    cases: tuple[EvaluationCase, ...]  # that these ranks can run
    left_out: tuple[EvaluationCase, ...]
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
        """What a record contains of them."""
        names = ("documents", "vocabulary", "cp_comm_type", "compiled", "warmup", "repeats")
        return {
            **{name: getattr(self.flags, name) for name in names},
            "ranks": self.ranks,
            "command": self.command,
            "left_out": [case.name for case in self.left_out],
        }


def make_settings(flags: EvalBenchFlags, ranks: int, backend: str, command: Sequence[str]) -> EvaluationSettings:
    """The settings that the ranks receive. Raises ConfigError for an unknown case, and if no case can run."""
    flags.check_flags()
    check_least(flags, documents=1, layers=0, tokens=0, vocabulary=8)
    changes = {"preset": flags.preset, "layers": flags.layers, "tokens": flags.tokens}
    cases = cases_of(flags.cases, gpu=backend != "gloo", **changes)
    run = tuple(case for case in cases if case.runs_on(ranks))
    if not run:
        need = ", ".join(f"{case.name} {case.ranks}" for case in cases)
        raise ConfigError(f"none of the cases runs on {ranks} ranks; they need multiples of: {need}")
    left_out = tuple(case for case in cases if case not in run)
    command = " ".join(command)
    return EvaluationSettings(flags=flags, cases=run, left_out=left_out, ranks=ranks, backend=backend, command=command)

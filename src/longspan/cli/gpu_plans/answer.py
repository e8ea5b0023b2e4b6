"""The answer to a question about GPUs as a value: what fits, what it holds, the longest document, keys, hours.

`questions.py` makes answers, `answer_text.py` writes them. No torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.cli.gpu_plans.fit import Fit
from longspan.cli.gpu_plans.run_on_gpus import RunOnGpus
from longspan.config.keys import key_value
from longspan.config.sections import RunConfig, section_kinds
from longspan.plan import MemoryPlan, Plan, group_counts

# Keys by which measures are given by hand.
BY_HAND = (
    "memory",
    "activation_checkpointing",
    "recompute_layers",
    "offload_activations",
    "offload_states",
    "mlp_tile_rows",
    "segment_layers",
)
GATHERS = "parallel.reshard_after_forward"
LOWEST_DEGREE = "context.min_dynamic_context_parallel_size"  # of dynamic plans
HIGHEST_DEGREE = "context.max_dynamic_context_parallel_size"
SHOWN = ("train", "lora", "parallel", "context", "mtp", "encoder")  # sections whose keys an answer repeats
OF_MODELS = ("model.dtype", "model.compute_dtype")


@dataclass(frozen=True)
class Column:
    """A column of the table: measures, what they hold, tokens of the longest document, and whether they fit."""

    name: str
    memory: MemoryPlan | None
    tokens: int
    fits: bool


@dataclass(frozen=True)
class Degree:
    """How much of some steps runs at one degree: groups, and their share of the tokens."""

    degree: int
    groups: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer: `memory` is that of "auto" on the GPUs of `run`; where nothing `fits`, that of the leanest measures.

    `fit` is the way that was found: where nothing fits, on the same GPUs without measures by hand, or on more GPUs;
    None if there is none. `given_keys` are those of the question; `longest` is the longest document that fits, in
    tokens, and `refusal` why planning failed. `steps` are those of a run (None: one step was asked about), of which
    `sampled` were planned.
    """

    title: str
    run: RunOnGpus
    fits: bool
    memory: MemoryPlan
    columns: tuple[Column, ...]
    fit: Fit | None
    given_keys: frozenset[str]
    longest: int = 0
    refusal: str = ""
    steps: int | None = None
    sampled: int = 0
    notes: tuple[str, ...] = ()
    degrees: tuple[Degree, ...] = ()

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step on the GPUs in question."""
        return self.fit.seconds if self.fit and self.fits else None

    @property
    def hours(self) -> float | None:
        """Hours of all steps of a run."""
        seconds = self.step_seconds
        return None if seconds is None or self.steps is None else seconds * self.steps / 3600

    @property
    def needs_free_measures(self) -> bool:
        """Whether it fits the same GPUs only without the measures that are given by hand."""
        return not self.fits and self.fit is not None and self.fit.run.gpus.count == self.run.gpus.count

    @property
    def keys(self) -> Mapping[str, Any]:
        """Return the keys of `fit`: those that were given and chosen, without measures by hand where they prevent it.

        {} if nothing fits.
        """
        if self.fit is None:
            return {}
        names = {key for key in self.given_keys if not (self.needs_free_measures and _is_memory_key(key))}
        return run_keys(self.fit.run, frozenset(names))

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `longspan plan --json` prints it: bytes as integers, `device` and `host` for one GPU.

        Where nothing fits, `keys` are those that were asked about, and `would_fit` has those that would do.
        """
        gpus, memory = self.run.gpus, self.memory
        values: dict[str, Any] = {
            "device": memory.device.to_json(),
            "host": memory.host.to_json(),
            "measures": list(memory.measures),
            "longest": self.longest,
            "fits": self.fits,
            "keys": dict(self.keys) if self.fits else run_keys(self.run, self.given_keys),
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "hours": self.hours,
            "gpu_hours": None if self.hours is None else self.hours * gpus.count,
            "degrees": [vars(degree) for degree in self.degrees],
            "gpu": gpus.name,
            "gpus": gpus.count,
            "gpu_bytes": gpus.bytes,
            "host_bytes": gpus.host_bytes,
            "assumed": list(gpus.assumed),
            "columns": {column.name: _column_json(column) for column in self.columns},
            "notes": list(self.notes),
        }
        if not self.fits:
            values |= {"reason": self.refusal, "would_fit": self._would_fit_json()}
        return values

    def _would_fit_json(self) -> dict[str, Any] | None:
        """Return the bytes, the number of GPUs and the keys of what would fit; None where nothing would."""
        if self.fit is None:
            return None
        return self.fit.memory.to_json() | {"gpus": self.fit.run.gpus.count, "keys": dict(self.keys)}


def _is_memory_key(key: str) -> bool:
    """Return whether a key sets a measure of memory by hand."""
    return key.removeprefix("train.") in BY_HAND or key == GATHERS


def _column_json(column: Column) -> dict[str, Any] | None:
    """Return a column as JSON; None for measures under which no document fits."""
    if column.memory is None:
        return None
    return column.memory.to_json() | {"longest": column.tokens, "fits": column.fits}


def run_keys(run: RunOnGpus, given_keys: frozenset[str]) -> dict[str, Any]:
    """Return the keys of a run that an answer shows, with their values, as `longspan train` takes them.

    These are:

    - of `given_keys`, those of the question, the keys in a section of SHOWN and those in OF_MODELS: model and data are
      named elsewhere in the command;
    - the keys of [lora], [mtp] and [parallel] that differ from their defaults, GATHERS only if it is given: otherwise
      train.memory decides when parameters are gathered;
    - always those of planner, degree, communication type, rows and memory; a dynamic plan's highest degree is all slots
      where it has no limit;
    - `model.rope_scaling` where it is set, as the plan may have set it.
    """
    config, one_degree = run.config, run.choice.has_one_degree
    names = {name for name in given_keys if name.partition(".")[0] in SHOWN or name in OF_MODELS}
    names |= {name for name in _non_default_keys(config) if name != GATHERS or name in given_keys}
    names |= {"train.memory", "context.planner", "context.cp_comm_type", "context.max_tokens_per_slot"}
    names |= {"context.context_parallel_size"} if one_degree else {LOWEST_DEGREE, HIGHEST_DEGREE}
    names |= {"model.rope_scaling"} if config.model.rope_scaling else set()
    values = {name: _read_key(config, name) for name in sorted(names)}
    if not one_degree and not values[HIGHEST_DEGREE]:
        values[HIGHEST_DEGREE] = run.home.slots
    return values


def _non_default_keys(config: RunConfig) -> set[str]:
    """List the keys of [lora], [mtp] and [parallel] that differ from their defaults."""
    names = set[str]()
    for section, kind in section_kinds().items():
        if section in ("lora", "mtp", "parallel"):
            section_value, default_value = getattr(config, section), kind()
            names |= {
                f"{section}.{key}"
                for key in vars(section_value)
                if getattr(section_value, key) != getattr(default_value, key)
            }
    return names


def _read_key(config: RunConfig, name: str) -> Any:
    """Return the value of "section.key" in a configuration, a tuple as a list."""
    section, _, key = name.partition(".")
    value = key_value(getattr(config, section), key)
    return list(value) if isinstance(value, tuple) else value


def count_degrees(plans: Sequence[Plan]) -> tuple[Degree, ...]:
    """Count the groups of each degree in some plans, and the share of all tokens that they have."""
    groups, tokens = Counter[int](), Counter[int]()
    for row in (row for plan in plans for row in group_counts(plan)):
        groups[row["degree"]] += row["count"]
        tokens[row["degree"]] += row["tokens"]
    return tuple(Degree(d, groups[d], tokens[d] / (tokens.total() or 1)) for d in sorted(groups))

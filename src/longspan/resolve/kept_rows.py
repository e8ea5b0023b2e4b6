"""The rows of a slot that a run keeps in its folder: those of its first start hold again for the same ranks and keys.

Where a rank runs out of memory in the warm-up, they are halved, and the run begins anew.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longspan.config.keys import AUTO
from longspan.config.memory_keys import FORM_KEYS, MEMORY_KEYS
from longspan.config.sections import RunConfig
from longspan.errors import CommError, ConfigError
from longspan.files import read_json, write_atomically
from longspan.resolve.facts import Facts
from longspan.resolve.planner_config import plan_row_multiple
from longspan.resolve.resolved import Resolved, resolve, set_evaluation_rows
from longspan.resolve.ways import BindingKeys, Way

# The file is in the run's folder.
FILE = "max_tokens_per_slot.json"
# Keys on which the rows of a slot depend, besides those of whole sections.
_SECTIONS = ("model", "parallel", "context", "lora", "mtp", "encoder")
_TRAIN_KEYS = {*MEMORY_KEYS, *FORM_KEYS.values()} - {"train.compile"}
_KEYS = {
    "data": ("tokenizer", "vocab_size"),
    "optimizer": ("class", "arguments", "stochastic_rounding"),
    "train": tuple(key.removeprefix("train.") for key in sorted(_TRAIN_KEYS) if key.startswith("train.")),
}


class SlotRowsError(ConfigError):
    """A rank that ran out of memory before step 1; with "auto" rows the run begins anew with half of them."""


@dataclass(frozen=True)
class SlotRows:
    """The `rows` of a slot in a micro-batch, halved from those `planned`, on `ranks` many ranks under these keys."""

    rows: int
    planned: int
    ranks: int
    keys: dict[str, Any]

    @property
    def line(self) -> str:
        """What a run and its dry run say of these rows."""
        halved = f" (of {self.planned:,}, for which a rank had no memory)" if self.rows < self.planned else ""
        return f"max_tokens_per_slot: {self.rows:,} rows{halved}"


def read_kept_rows(config: RunConfig, ranks: int) -> SlotRows | None:
    """Read the rows that an earlier start of this run chose; None if none are kept, or if they were chosen on another
    number of ranks or under other keys. Raises ConfigError for a damaged file.
    """
    file = Path(config.run.dir) / FILE
    keys = keys_that_decide_rows(config)
    if not file.is_file():
        return None
    slot_rows = _read_slot_rows(file)
    if slot_rows.ranks == ranks and slot_rows.keys.items() >= keys.items():
        return slot_rows
    return None


def with_kept_rows(config: RunConfig, ranks: int) -> RunConfig:
    """Return the configuration with the rows that this run keeps in place of "auto", for one that does not train."""
    if config.context.max_tokens_per_slot != AUTO:
        return config
    kept = read_kept_rows(config, ranks)
    return set_rows(config, kept.rows) if kept else config


def _read_slot_rows(file: Path) -> SlotRows:
    try:
        slot_rows = SlotRows(**read_json(file))
        numbers = slot_rows.rows, slot_rows.planned, slot_rows.ranks
        if not all(type(number) is int and number > 0 for number in numbers) or not isinstance(
            slot_rows.keys, dict
        ):
            raise ValueError("rows, planned and ranks are numbers of at least 1, and keys a table")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}; remove it and rows are chosen again") from error
    return slot_rows


def resolve_with_kept_rows(config: RunConfig, facts: Facts) -> Resolved:
    """Resolve with the rows of a slot that the run's folder keeps; if it keeps none, choose rows and write them there.
    Only the first rank calls this. `rows_line` of the result says the rows.
    """
    resolved = resolve_by_kept_rows(config, facts)
    if resolved.rows_line:
        return resolved
    rows = int(resolved.config.context.max_tokens_per_slot)
    slot_rows = SlotRows(rows, rows, len(facts.home.ranks), keys_that_decide_rows(config))
    write_atomically(Path(config.run.dir) / FILE, json.dumps(vars(slot_rows), indent=1))
    return replace(resolved, rows_line=slot_rows.line)


def resolve_by_kept_rows(config: RunConfig, facts: Facts, given: BindingKeys | None = None) -> Resolved:
    """Resolve with the rows of a slot that the run's folder keeps for these ranks and keys, which `rows_line` of the
    result says ("": none are kept). Nothing is written.

    Memory is planned for the rows that were chosen at first, also where the run has halved them since.
    """
    is_open = config.context.max_tokens_per_slot == AUTO
    kept = read_kept_rows(config, len(facts.home.ranks)) if is_open else None
    if kept is None:
        return resolve(config, facts, given)
    resolved = resolve(set_rows(config, kept.planned), facts, given)
    if kept.rows < kept.planned:
        # no budget: without a plan of memory
        halved = resolve(set_rows(config, kept.rows), replace(facts, budget=None), given)
        cost = Way(halved.config, facts).cost(resolved.memory)
        resolved = replace(halved, memory=resolved.memory, cost=cost, ranking=None)
    return replace(resolved, rows_line=kept.line)


def ran_short_of_memory(error: BaseException) -> bool:
    """Return whether an error is SlotRowsError, or that of another rank, which quotes it."""
    return isinstance(error, SlotRowsError) or (
        isinstance(error, CommError) and SlotRowsError.__name__ in str(error)
    )


def halve_kept_rows(config: RunConfig) -> None:
    """Halve the kept rows, in their file. Only the first rank calls this. Raises OSError if no rows are kept, and
    ConfigError for a damaged file.
    """
    file = Path(config.run.dir) / FILE
    multiple = plan_row_multiple(config.parallel)
    kept = _read_slot_rows(file)
    rows = max(1, kept.rows // 2 // multiple) * multiple
    write_atomically(file, json.dumps(vars(kept) | {"rows": rows}, indent=1))


def keys_that_decide_rows(config: RunConfig) -> dict[str, Any]:
    """Return the keys of a configuration by which the rows of a slot were chosen, by full name, as JSON gives them
    back.
    """
    values = config.tables()
    names = {section: tuple(values[section]) for section in _SECTIONS} | _KEYS
    keys = {f"{section}.{key}": values[section][key] for section in names for key in names[section]}
    return json.loads(json.dumps(keys))  # tuples become lists, so that they equal those read from a file


def set_rows(config: RunConfig, rows: int) -> RunConfig:
    """Return the configuration in which training, and evaluations with "auto", have these rows of a slot."""
    return set_evaluation_rows(config.with_keys("context", max_tokens_per_slot=rows), rows)

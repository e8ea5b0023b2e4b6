"""`max_tokens_per_slot = "auto"`: the rows of a slot that a plan of memory chose, kept in the run's folder.

The warm-up of GPUs runs one step of so many rows. Where a rank runs out of memory there, the run begins anew on all
ranks with half of the rows, and its layers keep what was chosen for all of them.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig
from longspan.errors import CommError, ConfigError
from longspan.files import read_json, write_atomically
from longspan.train.plans import plan_row_multiple

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan
    from longspan.train.memory.run_memory import RunMemory

FILE = "max_tokens_per_slot.json"  # in the run's folder
# Keys on which the rows of a slot depend, besides those of whole sections.
_SECTIONS = ("model", "parallel", "context", "lora", "mtp", "encoder")
_KEYS = {
    "data": ("tokenizer", "vocab_size"),
    "train": (
        *("optimizer", "optimizer_arguments", "stochastic_rounding"),
        *("activation_checkpointing", "offload_activations", "memory", "offload_states"),
        *("mlp_tile_rows", "loss_chunk_rows", "fused_norms", "float8"),
        *("memory_fraction", "memory_bytes"),
    ),
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


def choose_rows(
    run: "RunMemory", world: World, log: LogLine, *, finished: bool = False
) -> "tuple[RunConfig, MemoryPlan | None]":
    """Return the configuration, with rows of a slot in place of "auto", and the plan of memory; entered by all ranks.

    Rows that an earlier start chose on as many ranks, under the same keys, hold again. A `finished` run plans nothing.
    """
    from longspan.train.memory.run_memory import choose_memory_on_ranks

    config = run.config
    if config.context.max_tokens_per_slot != AUTO:
        return config, None if finished else choose_memory_on_ranks(run, world, log)[1]
    file, ranks, keys = Path(config.run.dir) / FILE, len(world.home.ranks), memory_keys(config)

    def read_rows() -> SlotRows | None:
        if not file.is_file():
            return None
        try:
            slot_rows = SlotRows(**read_json(file))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} is damaged: {error}; remove it and rows are chosen again") from error
        return slot_rows if (slot_rows.ranks, slot_rows.keys) == (ranks, keys) else None

    slot_rows: SlotRows | None = run_on_first_rank(world, read_rows, ConfigError)
    if slot_rows is not None:
        run = replace(run, config=_set_training_rows(config, slot_rows.planned))
    if finished:
        planned, memory = slot_rows.planned if slot_rows else run.ahead.rows_to_try(config)[0], None
    else:
        planned, memory = choose_memory_on_ranks(run, world, log)
    if slot_rows is None:
        slot_rows = SlotRows(planned, planned, ranks, keys)
        run_on_first_rank(world, lambda: write_atomically(file, json.dumps(vars(slot_rows), indent=1)), ConfigError)
    rows = slot_rows.rows
    halved = f" (of {slot_rows.planned:,}, for which a rank had no memory)" if rows < slot_rows.planned else ""
    log(f"max_tokens_per_slot: {rows:,} rows{halved}")
    return _set_eval_rows(_set_training_rows(config, rows), rows), memory


def ran_short_of_memory(error: BaseException) -> bool:
    """Return whether an error is SlotRowsError, or that of another rank, which quotes it."""
    return isinstance(error, SlotRowsError) or (isinstance(error, CommError) and SlotRowsError.__name__ in str(error))


def halve_rows(config: RunConfig) -> None:
    """Halve the rows that a run has kept in its folder; for the first rank."""
    file, multiple = Path(config.run.dir) / FILE, plan_row_multiple(config.parallel)
    values = read_json(file)
    rows = max(1, values["rows"] // 2 // multiple) * multiple
    write_atomically(file, json.dumps(values | {"rows": rows}, indent=1))


def use_training_rows(config: RunConfig) -> RunConfig:
    """Put the rows that the run chose for training in place of "auto" of evaluation, which keeps less of a row."""
    if config.context.evaluation.max_tokens_per_slot != AUTO:
        return config
    file = Path(config.run.dir) / FILE
    try:
        rows = int(read_json(file)["rows"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f'context.eval_max_tokens_per_slot is "{AUTO}", the rows that training has chosen, and {file} does not '
            f"say them ({error}); give a number of rows"
        ) from error
    return _set_eval_rows(config, rows)


def _set_training_rows(config: RunConfig, rows: int) -> RunConfig:
    return replace(config, context=replace(config.context, max_tokens_per_slot=rows))


def _set_eval_rows(config: RunConfig, rows: int) -> RunConfig:
    if config.context.evaluation.max_tokens_per_slot == AUTO:
        config = replace(config, context=config.context.set_evaluation(max_tokens_per_slot=rows))
    sets = (replace(s, max_tokens_per_slot=rows) if s.max_tokens_per_slot == AUTO else s for s in config.eval)
    return replace(config, eval=tuple(sets))


def memory_keys(config: RunConfig) -> dict[str, Any]:
    """Return the keys of a configuration on which the rows depend, with their values as JSON keeps them."""
    values = config.tables()
    names = {section: tuple(values[section]) for section in _SECTIONS} | _KEYS
    keys = {f"{section}.{key}": values[section][key] for section in names for key in names[section]}
    return json.loads(json.dumps(keys))  # tuples become lists, so that they equal those read from a file

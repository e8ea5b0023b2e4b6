"""One probe of `max_tokens_per_slot = "auto"`: a step of so many rows on every slot, and the most bytes that it takes.

A rank that runs out of memory inside a probe cannot go on: the others are in collectives that it has left, each perhaps
in another one. It ends the run with an error that names the probe, and the run's folder keeps how many rows were too
many: the next start of the run stays below.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from longspan.comm import World
from longspan.comm.watch import is_out_of_memory
from longspan.config.sections import EncoderSection, RunConfig
from longspan.errors import ConfigError
from longspan.files import read_json, write_atomically
from longspan.layout import Layout
from longspan.model.prepared import vocabulary_size
from longspan.model.seams.call_rules import call_rules
from longspan.plan import Plan
from longspan.train.memory.live_bytes import LiveBytes
from longspan.train.plans import PlanChoice, plan_row_multiple, query_heads
from longspan.train.step import run_step
from longspan.train.terms.mtp import mtp_loss

TOO_MANY_FILE = "max_tokens_per_slot.too_many.json"
# Keys on which the rows of a slot depend, besides all of [model], [parallel], [lora] and [mtp].
_DEPENDS_ON = {
    "data": ("tokenizer", "vocab_size"),
    "context": (
        *("planner", "mode", "context_parallel_size", "max_dynamic_context_parallel_size"),
        *("cp_comm_type", "hierarchical_context_parallel_sizes", "partition", "attention_kernel", "mixer_kernels"),
    ),
    "train": (
        *("optimizer", "optimizer_arguments", "stochastic_rounding"),
        *("activation_checkpointing", "recompute_layers", "offload_activations", "memory", "offload_states"),
        *("mlp_tile_rows", "segment_layers", "loss_chunk_rows", "fused_norms", "float8"),
        *("memory_fraction", "memory_bytes"),
    ),
}


@dataclass(frozen=True)
class TooMany:
    """Rows of a probe that did not fit, on so many ranks and under these keys of the configuration."""

    rows: int
    ranks: int
    measured_for: dict[str, Any]


class _Measured(Protocol):
    """A measurement that holds on `ranks` many ranks under the keys `measured_for`."""

    @property
    def ranks(self) -> int: ...
    @property
    def measured_for(self) -> dict[str, Any]: ...


Measurement = TypeVar("Measurement", bound=_Measured)


def measure_step_bytes(config: RunConfig, model: nn.Module, world: World, rows: int) -> int:
    """Measure the peak bytes of a step with `rows` rows on every slot, less the bytes in use before.

    Raises ConfigError on the rank whose memory does not suffice; the others raise CommError, which quotes it.
    """
    table = call_rules(model).position_table
    plan = probe_plan(config, world.home, rows, query_heads(model.config), positions=table and table.positions)
    # 0 and 1 are token ids of every model, also of one that does not say its vocabulary.
    random, vocabulary = np.random.default_rng(0), vocabulary_size(model) or 2
    documents = [random.integers(0, vocabulary, size=n) for n in plan.lengths]
    world.prepare(plan)
    try:
        return _measure_peak(config, model, world, plan, documents)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _record_too_many_rows(config, world, rows, error) from error
    finally:
        model.zero_grad(set_to_none=True)


def _measure_peak(config: RunConfig, model: nn.Module, world: World, plan: Plan, documents: Any) -> int:
    """Measure the peak bytes of a step of this plan on this rank, less the bytes in use before."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        bytes_before = torch.cuda.memory_allocated(world.device)
        run_step(model, plan, documents, world, loss_chunk_rows=config.train.loss_chunk_rows, mtp=mtp_loss(config))
        return torch.cuda.max_memory_allocated(world.device) - bytes_before
    with LiveBytes() as live_bytes:
        run_step(model, plan, documents, world, loss_chunk_rows=config.train.loss_chunk_rows, mtp=mtp_loss(config))
    return live_bytes.peak


def probe_plan(
    config: RunConfig, home: Layout, rows: int, heads: int | None = None, *, positions: int | None = None
) -> Plan:
    """Make a plan in which every slot holds `rows` rows in each micro-batch, of documents in the widest groups.

    A pipeline gets as many micro-batches as it holds at once. Under sequence parallelism `rows` is a multiple of tp.
    A group has one document, or several alike where one would be longer than a model's `positions`; slots then hold a
    few rows more, so that no part of a document is padded.
    """
    choice = PlanChoice.training(config, heads=heads)
    degree, unit = choice.widest_even_degree(home), 2 * plan_row_multiple(config.parallel)
    in_flight = max(1, home.pp * config.parallel.vpp)  # micro-batches that a pipeline holds at once
    most = rows if positions is None else min(rows, max(unit, positions // (degree * unit) * unit))
    count = -(-rows // most)  # documents of a group
    document_rows = min(most, -(-rows // (count * unit)) * unit)
    lengths = [document_rows * degree] * (home.slots // degree * in_flight * count)
    # without a pipeline's bubble in the price, for which more and smaller micro-batches would be made
    cost = replace(choice.options.cost, chunks=1 << 20)
    options = replace(choice.options, max_tokens_per_slot=document_rows * count, cost=cost)
    return replace(choice, options=options).at_degree(degree, longest=lengths[0]).plan(lengths, home)


def _record_too_many_rows(config: RunConfig, world: World, rows: int, error: BaseException) -> ConfigError:
    """Write to the run's folder that a probe of `rows` rows was too large for this rank; returns the error to raise."""
    too_many = TooMany(rows, len(world.home.ranks), memory_keys(config))
    with suppress(OSError):  # the folder may not be there on every rank
        write_atomically(Path(config.run.dir) / TOO_MANY_FILE, json.dumps(asdict(too_many), indent=1))
    return ConfigError(
        f'context.max_tokens_per_slot is "auto": rank {world.rank} ran out of memory in a probe of {rows} rows of a '
        f"slot ({str(error).partition('. ')[0]}). The run has written that down: started again it probes fewer rows, "
        f"or give a number below {rows}"
    )


def read_too_many_rows(directory: Path, ranks: int, keys: dict[str, Any]) -> int | None:
    """Read the rows of the probe that ran out of memory in an earlier start of the run, under the same keys, if any."""
    too_many = read_measurement(TooMany, directory / TOO_MANY_FILE, ranks, keys, "rows are probed from the start")
    return None if too_many is None else too_many.rows


def read_measurement(
    kind: type[Measurement], file: Path, ranks: int, keys: dict[str, Any], otherwise: str
) -> Measurement | None:
    """Read what the run measured before on this number of ranks, under the same keys; None if there is nothing.

    Raises ConfigError for a damaged file; `otherwise` describes what happens without the file.
    """
    if not file.is_file():
        return None
    try:
        measurement = kind(**read_json(file))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}; remove it and {otherwise}") from error
    return measurement if (measurement.ranks, measurement.measured_for) == (ranks, keys) else None


def memory_keys(config: RunConfig) -> dict[str, Any]:
    """Return the keys of a configuration on which the rows depend, with their values as JSON keeps them.

    Tuples become lists, so that they equal those read from a file. [encoder] counts only where it is not the default,
    so that its keys do not matter to runs of text.
    """
    values = config.tables()
    names = {"model": values["model"], "parallel": values["parallel"], "lora": values["lora"], "mtp": values["mtp"]}
    names |= _DEPENDS_ON
    if config.encoder != EncoderSection():
        names |= {"encoder": values["encoder"]}
    keys = {f"{section}.{key}": values[section][key] for section in names for key in names[section]}
    return json.loads(json.dumps(keys))

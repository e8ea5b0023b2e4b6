"""`longspan bench step`: whole training steps under several planners next to their predictions; the record in words."""

import sys
from collections.abc import Sequence
from typing import Any

from longspan.bench.record import origin_text, show_record
from longspan.bench.step.flags import PLANNERS, parse_step
from longspan.bench.step.ranks import Peers, measure_step_on_rank
from longspan.bench.step.settings import make_settings
from longspan.cli.processes import run_on_ranks
from longspan.errors import ConfigError
from longspan.plain_text import bytes_text, markdown_table, text_table
from longspan.plan.memory.memory_plan import measures_text
from longspan.train.run_memory import retries_text

_NAMES = (
    "step",
    "loss",
    "seconds",
    "tokens/s/device",
    "predicted",
    "ratio",
    "packing",
    "TFLOP/s",
    "MFU",
    "peak memory",
    "planned",
)
_NORMS = {
    "auto": ", norms fused on GPUs",
    "on": ", fused norms",
    "off": ", the model's own norms",
}
_COMPILED = {
    "layers": ", compiled layers",
    **dict.fromkeys(("modules", True), ", compiled norms and MLPs"),  # True and False are of older records
    **dict.fromkeys(("none", False), ""),
    "auto": "",  # a record's execution says what it came to
}


def record_text(record: dict[str, Any]) -> str:
    """Write a record for a terminal: its title, a table of rows, memory, and what did not run."""
    memory = f"\n\n{text}" if (text := _memory_text(record)) else ""
    memory += "".join(f"\n\n{line}" for line in _retries_lines(record))
    table = text_table(_NAMES, _table_rows(record))
    return f"{_record_title(record)}\n\n{table}{memory}{_missing_text(record)}"


def record_markdown(record: dict[str, Any]) -> str:
    """Write a record for people who read bench/records."""
    memory = f"{text}.\n\n" if (text := _memory_text(record)) else ""
    memory += "".join(f"{line}.\n\n" for line in _retries_lines(record))
    return (
        f"# {_record_title(record)}\n\n"
        f"{origin_text(record)}\n\n"
        f"{markdown_table(_NAMES, _table_rows(record))}\n\n{memory}"
        "Whole steps with forward, backward and optimizer, at learning rate 0: the loss is that of the same weights. "
        f"Seconds are the median of {record['repeats']} steps after {record['warmup']}, of the slowest rank. "
        f"Predicted under {record['cost_source']}. Model FLOPs are 6 a weight and token and causal attention, without "
        f"recomputation; padding does not count.\n{_missing_text(record)}\n"
    )


def _record_title(record: dict[str, Any]) -> str:
    shape = record["shape"]
    experts = f", {shape['experts']} experts" if shape["experts"] else ""
    offloaded = " offloaded" if record["offload"] else ""
    rows = f"{record['partition']} rows, " if record["partition"] != "zigzag" else ""
    kernels = _NORMS[record["fused_norms"]] + _COMPILED[record.get("compiled", "none")]
    return (
        f"Steps of {record['shape_name']} ({shape['layers']} layers, hidden {shape['hidden']}{experts}) over "
        f"{record['ranks']} ranks ({record['backend']}): {_documents_text(record)}; "
        f"{record['mode']}, {record['cp_comm_type']}, "
        f"{rows}at most {record['max_tokens_per_slot'] or 'any'} rows a slot, "
        f"recomputation {record['recompute']}{offloaded}{kernels}, "
        f"{record['parameters']}{' computed in ' + record['compute'] if record['compute'] else ''}"
    )


def _documents_text(record: dict[str, Any]) -> str:
    if record["sequences"]:
        return "one sequence at a time"
    return (
        f"{record['documents']:,} documents, {record['tokens']:,} tokens, longest {record['longest']:,} "
        f"({record['source']})"
    )


def _table_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [_record_row(row, _plan_bytes_text(record)) for row in record["rows"] if "missing" not in row]


def _plan_bytes_text(record: dict[str, Any]) -> str:
    memory = record.get("memory")
    return bytes_text(memory["device"]["total"] - memory["device"]["communicators"]) if memory else ""


def _memory_text(record: dict[str, Any]) -> str:
    if not (memory := record.get("memory")):
        return ""
    gathered = ", weights gathered once" if memory["gathered_once"] else ""
    offloaded = ", states on the host" if memory["offload_states"] else ""
    host = f"; {bytes_text(memory['host']['total'])} on the host" if memory["host"]["total"] else ""
    return f"memory: {measures_text(memory['measures'])}{gathered}{offloaded}{host}"


def _retries_lines(record: dict[str, Any]) -> list[str]:
    return [
        f"{row['name']}: {retries_text(row['allocator_retries'], row['peak_bytes'], row['reserved_bytes'])}"
        for row in record["rows"]
        if row.get("allocator_retries")
    ]


def _record_row(row: dict[str, Any], planned_memory: str) -> tuple[str, ...]:
    planned = "predicted_seconds" in row
    return (
        row["name"],
        f"{row['loss']:.6f}",
        f"{row['seconds']:.3f}",
        f"{row['tokens_per_second_per_device']:,.0f}",
        f"{row['predicted_seconds']:.3f}" if planned else "",
        f"{row['prediction_ratio']:.2f}" if planned else "",
        f"{row['packing']:.2f}" if planned else "",
        f"{row['model_tflops_per_device']:.3g}",
        f"{100 * row['mfu']:.1f} %" if "mfu" in row else "",
        bytes_text(row["peak_bytes"]) if row["peak_bytes"] else "",
        planned_memory if planned else "",
    )


def _missing_text(record: dict[str, Any]) -> str:
    return "".join(f"\n- {row['name']}: not available: {row['missing']}" for row in record["rows"] if "missing" in row)


CPU_RANKS = 2


def main(argv: Sequence[str], peers: Peers | None = None) -> int:
    """Run the bench, with peers beside the planners if some are given. Returns the exit code."""
    flags, config = parse_step(argv)
    ranks, backend = flags.processes(CPU_RANKS)
    settings = make_settings(flags, config, ranks, backend, ["longspan", "bench", "step", *argv])
    if not (settings.planners or peers):
        raise ConfigError(f"--planners is none: nothing to time; name some of {', '.join(PLANNERS)}")
    record = run_on_ranks(measure_step_on_rank, (settings, peers), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

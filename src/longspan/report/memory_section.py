"""The section of a run's page that shows its plan of memory: bytes by what they are for, next to the measured peak.

The plan is that of run.json, made before the model; the peak is the most of any step on the first rank.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from longspan.plain_text import bytes_text
from longspan.plan.memory.memory_plan import measures_text
from longspan.report.markup import scrolling_table, section, tag, text
from longspan.report.run_folder import RunFolder

KINDS = {
    "weights": "parameters of this rank",
    "gradients": "their gradients",
    "states": "the optimizer's states",
    "gathered": "whole parameters of layers, and their gradients before they are summed",
    "kept": "what layers keep between forward and backward",
    "work": "what the layer that runs holds besides",
    "logits": "a chunk of logits, and what the loss makes of it",
    "communicators": "buffers of NCCL, and the CUDA context",
}


def memory_section(run: RunFolder) -> str:
    """Return the section: what layers keep, and a table; "" for a run that had no plan of memory."""
    plan = run.facts.memory if run.facts is not None else {}
    device, host = _plan_bytes(plan, "device"), _plan_bytes(plan, "host")
    if not device.get("total"):
        return ""
    peak = peak_of_steps(run)
    measures = plan.get("measures")
    sentences = f"{measures_text(measures if isinstance(measures, list) else ())}."
    if peak and not device.get("communicators"):  # a plan for CPUs has none
        sentences += " On CPUs the measured peak is the whole process's, with Python and its libraries."
    measures = tag("p", text(sentences), class_="sub")
    return section("Memory", measures, _bytes_table(device, host, peak))


def peak_of_steps(run: RunFolder) -> float:
    """Return the most bytes of any step; 0 where none were recorded."""
    values = run.train["memory_bytes"]
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else 0.0


def peak_of_plan(run: RunFolder) -> float:
    """Return the planned bytes to compare with the peak of steps; 0 without a plan.

    Communicators are left out, because on GPUs the peak is what torch allocates.
    """
    device = _plan_bytes(run.facts.memory, "device") if run.facts is not None else {}
    return device.get("total", 0.0) - device.get("communicators", 0.0)


def _plan_bytes(plan: Mapping[str, Any], memory: str) -> dict[str, float]:
    values = plan.get(memory)
    names = (*KINDS, "total")
    known = values if isinstance(values, Mapping) else {}
    return {name: float(known[name]) for name in names if isinstance(known.get(name), int | float)}


def _bytes_table(device: Mapping[str, float], host: Mapping[str, float], peak: float) -> str:
    """On GPUs the peak is what torch allocates, so that a total without communicators stands above it."""
    rows = [
        (f"{kind}: {words}", _bytes_cell(device, kind), _bytes_cell(host, kind))
        for kind, words in KINDS.items()
        if device.get(kind) or host.get(kind)
    ]
    rows.append(("total", _bytes_cell(device, "total"), _bytes_cell(host, "total")))
    if device.get("communicators"):
        allocated = device["total"] - device["communicators"]
        rows.append(("total without communicators", bytes_text(allocated), ""))
    if peak:
        rows.append(("measured peak", bytes_text(peak), ""))
    return scrolling_table(("", "device", "host"), rows)


def _bytes_cell(values: Mapping[str, float], kind: str) -> str:
    return bytes_text(values[kind]) if values.get(kind) else ""

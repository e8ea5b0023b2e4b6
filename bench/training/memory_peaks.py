"""How good plans of memory are: the peak of every measured step of bench/records, and what `MemoryPlan` says. No GPU.

    python bench/training/memory_peaks.py                       # the table, bench/records/memory-predicted.md
    python bench/training/memory_peaks.py --out /dev/null --more FOLDER    # with further records

A peak is the most that torch's allocator gave out; the context and communicators, which it does not see, are left out
of predictions too. Each record is planned again from its lengths. Rows are off by more than 10 % where they say so.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan import Layout, plan_dynamic, plan_fixed, plan_padded
from longspan.model.presets import PRESETS
from longspan.plan import Machine, MemoryNeeds, MemorySettings, Plan, PlanOptions
from longspan.plan.memory.bytes import Bytes, gib_text

HERE = Path(__file__).resolve().parents[1]
RECORDS = HERE / "records"
BOUND = 0.1
STEPS = ("step-4xH200-64k", "step-4xH200-128k", "step-4xH200-files", "step-4xH200-tail", "step-4xH200-moe")
STEPS += ("step-H200-norms", "step-train-4xH200", "hybrid-step-H200", "hybrid-step-2xH200", "hybrid-step-4xH200")
STEPS += ("hybrid-step-packed-2xH200",)
OLDER = {  # what has changed in the code since a record was made
    "step-4xH200-moe": "experts ran with other kernels",
    "hybrid-step-4xH200": "made before the kernels of delta nets and of experts",
    ("step-4xH200-tail", "padded"): "an earlier run, with the model's own norms",
    ("step-4xH200-files", "padded"): "an earlier run, with the model's own norms",
}


@dataclass(frozen=True)
class Peak:
    """One measured peak, and the same as planned: without context and communicators."""

    record: str
    name: str
    model: str
    measured: int
    moment: Bytes
    older: str = ""

    @property
    def predicted(self) -> int:
        """Bytes of torch's allocator."""
        return self.moment.total - self.moment.communicators

    @property
    def error(self) -> float:
        """By how much of the measured the prediction is off."""
        return self.predicted / self.measured - 1


def all_peaks() -> Iterator[Peak]:
    """Every row, in the order of records."""
    for record in STEPS:
        values = json.loads((RECORDS / f"{record}.json").read_text())
        for row in values["rows"]:
            if "predicted_seconds" in row and row.get("peak_bytes"):
                yield _step(record, values, row)
    yield from _memory_cases(RECORDS)


def _step(record: str, values: dict[str, Any], row: dict[str, Any]) -> Peak:
    """Of `longspan bench step`."""
    name, slots = str(row["name"]), int(values["ranks"])
    config, words = _config(values), [values["recompute"]]
    layers = MemoryNeeds.of(config, Layout(1), (), MemorySettings()).layers
    # What was exchanged was kept when these records were made.
    word = {"selective": "exchanged"}.get(words[0], words[0])
    first = values.get("recompute_layers") or layers
    measures = [word if layer < first else "none" for layer in range(layers)]
    parameters = 2 if values["parameters"] == "bfloat16" else 4
    settings = MemorySettings(
        parameter_bytes=parameters,
        gathered_once=not values["reshard"],
        fused_norms="own norms" not in name,
        compiled="modules" if "compiled" in name else "none",
        loss_chunk_rows=values.get("loss_chunk_rows", 0),
    )
    plan = _plan(values, name, slots)
    older = OLDER.get(record) or next(
        (v for k, v in OLDER.items() if isinstance(k, tuple) and k[0] == record and k[1] in name), ""
    )
    return _peak(
        record,
        name,
        values["shape_name"],
        int(row["peak_bytes"]),
        (config, Layout(slots), plan, settings, measures),
        older,
    )


def _peak(record: str, name: str, model: str, measured: int, planned: Any, older: str = "") -> Peak:
    config, home, plan, settings, measures = planned
    memory = MemoryNeeds.of(config, home, plan, settings, machine=Machine.known("H200")).under(measures)
    return Peak(record, name, model, measured, memory.device, older)


def _config(values: dict[str, Any]) -> Any:
    shape, name = values["shape"], values["shape_name"]
    if name.startswith("examples/"):
        return HERE.parent / name
    config = _preset_values("qwen3-8b") | {"num_hidden_layers": shape["layers"], "hidden_size": shape["hidden"]}
    if shape.get("experts"):
        config |= {"model_type": "qwen3_moe", "num_key_value_heads": shape["key_value_heads"]}
        config |= {"intermediate_size": shape["ffn"], "moe_intermediate_size": shape["expert_ffn"]}
        config |= {"num_experts": shape["experts"], "num_experts_per_tok": shape["experts_per_token"]}
    return config


def _preset_values(name: str) -> dict[str, Any]:
    return {"model_type": PRESETS[name].model_type, **PRESETS[name].values}


def _plan(values: dict[str, Any], name: str, slots: int) -> Plan:
    lengths = values["lengths"]
    if (values.get("sequences") or []) and (rows := re.search(r"([\d,]+) rows", name)):
        lengths = [int(rows[1].replace(",", ""))]
    options = PlanOptions(
        max_tokens_per_slot=values["max_tokens_per_slot"] or None,
        cp_comm_type=values["cp_comm_type"],
        partition=values.get("partition", "zigzag"),
    )
    if "dynamic" in name:
        return plan_dynamic(lengths, Layout(slots), options=options)
    plan = plan_padded if "padded" in name else plan_fixed
    return plan(lengths, Layout(slots), values["cp"] or slots, options=options)


def _memory_cases(folder: Path) -> Iterator[Peak]:
    """Of records with "bench": "memory": steps that were run to be compared with plans of memory, with a run's keys."""
    for file in sorted(folder.glob("*.json")):
        values = json.loads(file.read_text())
        if isinstance(values, dict) and values.get("bench") == "memory":
            for name, case in values["cases"].items():
                if "peak" in case:
                    yield _memory_case(file.stem, name, case, values["versions"])


def _memory_case(record: str, name: str, case: dict[str, Any], versions: dict[str, str]) -> Peak:
    keys, home = case["keys"], Layout(case["ranks"], **case.get("home", {}))
    config = HERE.parent / keys["model.config"] if "model.config" in keys else _preset_values(keys["model.preset"])
    if case["layers"]:
        assert isinstance(config, dict)
        config["num_hidden_layers"] = case["layers"]
    bfloat16 = keys.get("model.dtype") == "bfloat16"
    settings = MemorySettings(
        parameter_bytes=2 if bfloat16 else 4,
        lora_rank=keys.get("lora.rank", 0),
        depths=keys.get("mtp.depths", 0),
        gathered_once=not keys.get("parallel.reshard_after_forward", True),
        loss_chunk_rows=keys.get("train.loss_chunk_rows", 0),
        scan_kernels="flash-linear-attention" in versions,
        state_numbers=0 if keys.get("train.optimizer") == "sgd" else 2,
    )
    layers = MemoryNeeds.of(config, Layout(1), (), settings).layers
    word = keys["train.activation_checkpointing"] + "+host" * keys.get("train.offload_activations", False)
    if case.get("kept_exchanged", True) and word == "selective":
        word = "exchanged"
    first = keys.get("train.recompute_layers") or layers
    plan = plan_fixed(
        case["lengths"],
        home,
        cp=keys.get("context.cp") or (1 if len(case["lengths"]) > 1 else home.slots),
        max_tokens_per_slot=case["cap"] or None,
        cp_comm_type=keys.get("context.cp_comm_type", "auto"),
        partition=keys.get("context.partition", "zigzag"),
    )
    measures = [word if layer < first else "none" for layer in range(layers)]
    model = keys.get("model.preset") or Path(keys["model.config"]).name
    return _peak(record, name, model, case["peak"], (config, home, plan, settings, measures))


def text_of(peaks: list[Peak]) -> Iterator[str]:
    """The record."""
    current = [peak for peak in peaks if not peak.older]
    yield from ("# Predicted and measured peaks of memory", "")
    good, mean = sum(abs(p.error) <= BOUND for p in current), sum(abs(p.error) for p in current) / len(current)
    yield (
        f"Command: `python bench/training/memory_peaks.py`. Of {len(current)} rows {good} are within 10 %; the mean "
        f"error is {100 * mean:.1f} %. The parts (GiB) are those of the prediction, without context and communicators."
    )
    names = ("weights", "gradients", "states", "gathered", "kept", "work", "logits")
    for title, some in (("", current), ("Older code, which does not count:", [p for p in peaks if p.older])):
        yield from ("", title, "") if title else ("",)
        yield f"| record | row | measured GiB | predicted | off | {' | '.join(names)} | |"
        yield f"|{' --- |' * (6 + len(names))}"
        for peak in some:
            parts = " | ".join(gib_text(getattr(peak.moment, name)).removesuffix(" GiB") for name in names)
            note = peak.older or ("**off**" if abs(peak.error) > BOUND else "")
            sizes = f"{peak.measured / 2**30:.1f} | {peak.predicted / 2**30:.1f} | {100 * peak.error:+.1f} %"
            yield f"| {peak.record} | {peak.name} | {sizes} | {parts} | {note} |"


def main() -> None:
    """Print and write the table."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--more", type=Path, help="a folder of further records")
    flags.add_argument("--out", type=Path, default=RECORDS / "memory-predicted.md")
    values = flags.parse_args()
    peaks = [*all_peaks(), *(_memory_cases(values.more) if values.more else ())]
    text = "\n".join(text_of(peaks)) + "\n"
    print(text, end="")
    values.out.write_text(text)


if __name__ == "__main__":
    main()

"""Measured steps, layers and peaks of memory, each with what a run plans it by: bench/records/measured.json.

A row predicts itself by the public path: the cost of the model on a machine (`Machine.cost`), the planner of the row,
`plan.predicted_seconds`; a peak by `MemoryNeeds`. No constant of a row is fitted to it. A row that was measured before
the code it runs was changed says so in `older`.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from longspan import Group, Layout, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.model.presets import preset_config
from longspan.plan import (
    AttentionCall,
    Cost,
    CostSettings,
    EncoderShape,
    Machine,
    MemoryNeeds,
    MemorySettings,
    PlanOptions,
)
from longspan.plan.memory.settings import Bytes
from longspan.resolve.evaluation import plan_evaluation

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "bench/records"


@cache
def _values() -> dict[str, Any]:
    return json.loads((RECORDS / "measured.json").read_text())


@dataclass(frozen=True)
class Measured:
    """One measured time; `by` says how the same is planned."""

    record: str
    name: str
    model: str
    slots: int
    rows: str
    kind: str
    settings: str
    seconds: float
    by: dict[str, Any]
    older: str = ""

    @property
    def device(self) -> str:
        return "H100" if self.record.endswith("H100") else "H200"

    @property
    def is_layer(self) -> bool:
        return "attention" in self.by

    @property
    def is_training_step(self) -> bool:
        return not self.is_layer and not self.settings.startswith("forward")

    def predict(self, machine: Machine) -> float:
        """The planned seconds on a machine; links that were calibrated in the same run are part of the row."""
        if self.is_layer:
            return _predict_layer(machine, self.kind, self.by)
        if "adapters" in self.by:
            by = self.by["adapters"]  # on one slot; the record has sums of rows and of their squares, not lengths
            cost = machine.cost(_config(by["config"]), _cost_settings(by["cost"]))
            work = float(cost.work_seconds(by["tokens"], by["squares"]))
            return work + by["micro_batches"] * cost.micro_batch_seconds + cost.update_seconds
        if "machine_cost" in self.by:
            cost = Cost.from_json(_values()["machine_costs"][self.by["machine_cost"]])
            return _plan(self.by, cost).predicted_seconds
        config = _config(self.by["config"])
        plan = _plan(self.by, machine.cost(config, _cost_settings(self.by["cost"])))
        if "images" not in self.by:
            return plan.predicted_seconds
        images = [n for document in self.by["images"] for n in document]
        cost = EncoderShape.of(config).cost(again=1)
        waves = plan_dynamic(images, Layout(plan.slots), max_tokens_per_slot=8192, max_cp=1, cost=cost, effort="fast")
        return plan.predicted_seconds + waves.predicted_seconds


@dataclass(frozen=True)
class Peak:
    """The most that torch's allocator gave out in a step, and the same as planned.

    Context and communicators, which the allocator does not see, are left out of the prediction too.
    """

    record: str
    name: str
    model: str
    measured: int
    by: dict[str, Any]
    older: str = ""

    def moment(self) -> Bytes:
        """The planned bytes of the device, by their parts."""
        policies = [word for word, layers in self.by["recomputed"] for _ in range(layers)]
        home = Layout(**self.by["layout"])
        settings = MemorySettings(**self.by["memory"], keys_are_repeated=True)  # by transformers 5.17
        config = _config(self.by["config"])
        plan = _plan(self.by, Cost())
        return MemoryNeeds.of(config, home, plan, settings, machine=Machine.known("H200")).under(policies).device


def measured_rows() -> list[Measured]:
    return [Measured(**row) for row in _values()["rows"]]


def measured_peaks() -> list[Peak]:
    return [Peak(**row) for row in _values()["peaks"]]


def _cost_settings(values: dict[str, Any]) -> CostSettings:
    """The settings of a row: its layers recompute alike, all of them or as many as it says."""
    form = dict(values)
    word, layers = form.pop("recomputation", "none"), form.pop("recomputed_layers", 0)
    frozen = form.pop("frozen", False)  # true, or how frozen weights are stored
    trains_all = not frozen
    form |= {"frozen": frozen} if isinstance(frozen, str) else {}
    return CostSettings(checkpoint_policies=(word,) * layers or word, trains_all=trains_all, **form)


def _config(name: str) -> Any:
    values = dict(_values()["configs"][name])
    if "folder" in values:
        return ROOT / values["folder"]
    if "preset" not in values:
        return values
    config = preset_config(values["preset"], vocab_size=values["vocab_size"])
    config.num_hidden_layers = values["num_hidden_layers"]
    return config


def _plan(by: dict[str, Any], cost: Cost) -> Plan:
    """The plan of a row; of several degrees the one of least predicted seconds."""
    lengths, home, options = by["lengths"], Layout(**by["layout"]), PlanOptions(**by["options"], cost=cost)
    if isinstance(lengths, str):
        lengths = _values()["documents"][lengths]
    if by["planner"] == "dynamic":
        return plan_dynamic(lengths, home, options=options)
    if by["planner"] == "evaluation":
        (degree,) = by["cp"]
        return plan_evaluation(lambda o: plan_fixed(lengths, home, degree, options=o), lengths, home, options, degree)
    planner = plan_padded if by["planner"] == "padded" else plan_fixed
    return min((planner(lengths, home, cp, options=options) for cp in by["cp"]), key=lambda p: p.predicted_seconds)


def _predict_layer(machine: Machine, kind: str, by: dict[str, Any]) -> float:
    """A layer by itself takes no less than the host needs for its launches, where these were measured."""
    if "machine" in by:
        machine = Machine.from_json(_values()["machines"][by["machine"]])
    if "link" in by:
        machine = machine.with_link("across", **by["link"])
    lengths = by["group"]["lengths"]
    sizes = by["group"].get("sizes")
    levels = (sizes[0], sizes[1]) if sizes else None
    slots = tuple(range(by["group"]["slots"]))
    documents = tuple(range(len(lengths)))
    group = Group(slots, documents, tuple(lengths), hierarchical_context_parallel_sizes=levels)
    prices = machine.attention_prices(group, AttentionCall(**by["attention"]), node_size=by.get("node_size", 8))
    return max(by.get("host_seconds", 0.0), prices[kind].seconds)

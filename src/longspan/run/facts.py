"""The facts of a run (run.json) and its result (summary.json), as values without torch: the report reads them too."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from longspan.errors import plural
from longspan.evaluation.result import SAME, Evaluation, evaluation_table, largest_difference
from longspan.files import json_values
from longspan.versions import versions

LOCK = "run.lock"  # in a run's folder; locked by the run that is at work in it


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run at the start of a session: model, types, devices, home, attention, plans, data and steps.

    Sizes are of the rank that holds most; `trained` counts an adapter's parameters; `peak_tflops` is None where it is
    not known; texts are "" where a run has no such fact; `caution` is what a user of these devices would want to
    change; `sessions` are the steps that were done when each began, and its ranks, this one last; `memory` is a
    MemoryPlan as JSON.
    """

    model: str
    parameters: int
    parameters_of_rank: int
    experts: int
    experts_of_token: int
    parameter_dtype: str
    compute_dtype: str
    reduce_dtype: str
    device: str
    ranks: int
    hosts: int
    cores: int
    backend: str
    home: dict[str, int]
    sequence_parallel: bool
    comm_types: str
    kernels: tuple[str, ...]
    plans: str
    priced_for: str
    peak_tflops: float | None
    uncounted: str
    documents: int
    held_out: int
    tokens: int
    longest: int
    steps: int
    done: int
    tokens_per_step: int
    optimizer: str
    lr: float
    report: str
    trained: int = 0
    evaluated: str = ""
    float8: str = ""
    mixers: str = ""
    compiled: str = ""
    mtp: str = ""
    encoder: str = ""
    rows: str = ""
    caution: str = ""
    node_size: int = 0
    date: str = ""
    command: str = ""
    sessions: tuple[tuple[int, int], ...] = ()
    memory: dict[str, Any] = field(default_factory=dict[str, Any])
    starts: dict[str, float] = field(default_factory=dict[str, float])  # seconds, once the first step is done

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each line, for the console and the report."""
        experts = f", {self.experts_of_token} of {self.experts} experts a token" if self.experts else ""
        sizes = f"{_size_text(self.parameters)} parameters, {_size_text(self.parameters_of_rank)} on a rank"
        sizes += f", {_size_text(self.trained)} trained" if self.trained else ""
        yield "model", f"{self.model}: {sizes}{experts}"
        sums = f"gradients summed in {self.reduce_dtype}"
        yield "precision", f"parameters {self.parameter_dtype}, compute {self.compute_dtype}, {sums}"
        yield "devices", self._device_text()
        yield "home", ", ".join(self._home_texts())
        yield "attention", f"{self.comm_types}; kernel {'; '.join(self.kernels) or 'chosen in the first pass'}"
        optional = {
            "products": self.float8,
            "mixers": self.mixers,
            "compiled": self.compiled,
            "mtp": self.mtp,
            "encoder": self.encoder,
            "rows": self.rows,
        }
        yield from ((name, text) for name, text in optional.items() if text)
        yield "plans", self.plans + (f"; priced for {self.priced_for}" if self.priced_for else "")
        for reason in self.evaluated.splitlines():
            yield "evaluation", reason.removeprefix("evaluation ")
        held_out = f", {self.held_out:,} of them held out" if self.held_out else ""
        documents = f"{plural(self.documents, 'document')} of {plural(self.tokens, 'token')}"
        yield "data", f"{documents}, longest {self.longest:,}{held_out}"
        done_text = f", of which {self.done:,} are done" if self.done else ""
        yield "steps", f"{self.steps:,}{done_text}, each of up to {self.tokens_per_step:,} tokens"
        if resumed := [f"at step {step:,} on {plural(ranks, 'rank')}" for step, ranks in self.sessions if step]:
            yield "resumed", ", ".join(resumed)
        yield "optimizer", f"{self.optimizer}, lr {self.lr:g} at most"
        yield (
            "report",
            f"{self.report} when the run ends; to watch it: longspan report {Path(self.report).parent} --follow",
        )
        if self.uncounted:
            yield "no MFU", f"model FLOPs are not counted: {self.uncounted}"
        if self.caution:
            yield "caution", self.caution

    def _home_texts(self) -> Iterator[str]:
        host_text = f" ({self.node_size} a host)" if self.hosts > 1 and self.node_size else ""
        yield plural(self.home["slots"], "slot") + host_text
        yield from (f"{name} {degree}" for name, degree in self.home.items() if name != "slots" and degree > 1)
        if self.sequence_parallel:
            yield "sequence-parallel"

    def _device_text(self) -> str:
        if self.device == "CPU":
            cores = f"{plural(self.ranks, 'process', 'es')} on {plural(self.cores, 'CPU core')}"
            return f"{cores}{_hosts_text(self.hosts)}, {self.backend}"
        peak = f"; MFU is of {self.peak_tflops:g} TFLOP/s each" if self.peak_tflops and not self.uncounted else ""
        return f"{self.ranks} x {self.device}{_hosts_text(self.hosts)}, {self.backend}{peak}"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunFacts | None":
        """Return the facts in a run.json; None if another release wrote it with other keys, or a type is wrong."""
        try:
            sessions = tuple((step, ranks) for step, ranks in values.get("sessions", ()))
            facts = cls(**{**values, "kernels": tuple(values["kernels"]), "sessions": sessions})
        except (KeyError, TypeError, ValueError):
            return None
        return facts if facts._has_types() else None

    def _has_types(self) -> bool:
        """Files may come from elsewhere: numbers, texts and booleans are checked by annotation, lists by entry."""
        kinds: dict[Any, Any] = {int: int, float: int | float, float | None: int | float | None, str: str, bool: bool}
        # `object` lets every value of another annotation pass
        simple_fit = all(isinstance(vars(self)[field.name], kinds.get(field.type, object)) for field in fields(self))
        counts = [count for session in self.sessions for count in session]
        lists_fit = all(isinstance(name, str) for name in self.kernels) and all(isinstance(n, int) for n in counts)
        home_fits = isinstance(self.home, dict) and all(isinstance(n, int) for n in self.home.values())
        return (
            simple_fit
            and lists_fit
            and home_fits
            and "slots" in self.home
            and isinstance(self.memory, dict)
            and isinstance(self.starts, dict)
        )


def facts_text(facts: RunFacts) -> str:
    lines = list(facts.lines())
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _hosts_text(hosts: int) -> str:
    return f", {hosts} hosts" if hosts > 1 else ""


def _size_text(count: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:,}"


LAST_STEPS = 10  # whose mean loss sums up a run


@dataclass(frozen=True)
class TrainResult:
    """The result of a run on `world` ranks: its steps, why it stopped early, its last losses.

    `final` are the last evaluations of the held-out documents, at every degree, `named` those of the named sets.
    """

    dir: Path
    done: int
    steps: int
    stopped: str
    last_loss: float
    vocab_size: int
    final: tuple[Evaluation, ...]
    named: tuple[Evaluation, ...] = ()
    world: int = 1

    def summary(self) -> dict[str, Any]:
        values = {
            "step": self.done,
            "steps": self.steps,
            "stopped": self.stopped,
            "vocab_size": self.vocab_size,
            "loss_of_last_steps": self.last_loss,
            "share_of_ln_vocabulary": self.last_loss / math.log(self.vocab_size),
            "eval_at_degrees": [evaluation.row() for evaluation in self.final],
            "eval_sets": [evaluation.row() for evaluation in self.named],
            "world": self.world,
            "versions": versions(),
        }
        return json_values(values)

    def degrees_text(self) -> str:
        if len(self.final) < 2:
            return ""
        difference = largest_difference([evaluation.loss for evaluation in self.final])
        if difference > SAME:
            return f"losses at these degrees differ by up to {difference:.1e}. "
        return f"equal to {difference:.1e}: the same loss at every degree. "

    def text(self) -> str:
        uniform = math.log(self.vocab_size)
        share = 100 * self.last_loss / uniform
        steps = min(LAST_STEPS, self.done)
        mean = f"mean loss of the last {plural(steps, 'step') if steps > 1 else 'step'}: {self.last_loss:.4f}"
        lines = (
            [f"{mean} ({share:.1f} % of ln {self.vocab_size:,} = {uniform:.3f}, the loss of a uniform guess)"]
            if self.done
            else []
        )
        if self.stopped:
            lines.append(f"stopped by {self.stopped} after step {self.done} of {self.steps}; the same command goes on")
        evaluations = (*self.final, *self.named)
        return "\n".join([*lines, *([evaluation_table(evaluations)] if evaluations else [])])

"""How good predictions are: every measured step and layer of bench/records beside what the planner says. Needs no GPU.

    make predictions                                  # the table, bench/records/predictions.md, status 1 above 5 %
    python bench/plans/predictions.py --out /dev/null

One machine, `Machine.known("H200")`, predicts all rows of H200s, by the path that a run takes (`measured.py`). Its
figures were fitted to every second step of H200s and to single layers on four of them; the others are held out.
A row counts that is more than 5 % off, of a machine whose figures are `assumed`, as those of H100s are, 10 %. Rows that
were measured before the code they run was changed stand apart with the reason and the command that makes them again,
and do not count.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from measured import AFTER_FIT, FITTED, RECORDS, Measured, measured_rows, record_command

from longspan.plan import Machine
from longspan.plan.cost.machine_figures import KNOWN

BOUNDS = (0.05, 0.1, 0.2)
COLUMNS = ("record", "model", "slots", "rows", "type", "settings", "measured s", "predicted s", "ratio", "")


class Prediction(NamedTuple):
    """A measured row and its predicted seconds; `use` is "fitted", "held out", or empty for rows of older code."""

    row: Measured
    seconds: float
    use: str
    bound: float = BOUNDS[0]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.seconds / self.row.seconds

    @property
    def is_off(self) -> bool:
        """Whether it counts, and is off by more than its bound."""
        return bool(self.use) and not self.within(self.bound)

    def within(self, bound: float) -> bool:
        """Whether it is off by no more than this share."""
        return abs(self.ratio - 1) <= bound


def predict_all(machine: Machine, rows: Sequence[Measured] = ()) -> list[Prediction]:
    """All `rows` in the order of records, which are read if there are none."""
    steps, predictions = 0, list[Prediction]()
    for row in rows or measured_rows():
        use = "" if row.older else "held out"
        if use and row.record in FITTED:
            use = "fitted"
        elif use and _is_of_fit(row, machine):
            use = "held out" if steps % 2 else "fitted"
            steps += 1
        predictions.append(_predict_row(row, machine, use))
    return predictions


def _is_of_fit(row: Measured, machine: Machine) -> bool:
    """Whether it is one of the steps of which every second was fitted to."""
    is_step = row.is_training_step and row.device == machine.device
    return is_step and not row.is_calibrated and row.record not in AFTER_FIT


def _predict_row(row: Measured, machine: Machine, use: str) -> Prediction:
    machine = scale_machine(machine, row.device)
    assumed = machine.assumed and not row.is_calibrated
    return Prediction(row, row.predict(machine), use, BOUNDS[1] if assumed else BOUNDS[0])


def scale_machine(machine: Machine, device: str) -> Machine:
    """Return this machine as other GPUs by data sheet, as `Machine.known` scales it, with its own speeds of kinds."""
    scale = KNOWN[device]
    if device == machine.device or scale is None:
        return machine
    scaled = machine.scale_figures(device, *scale)
    slower = machine.inside.point.bytes_per_second / scaled.inside.point.bytes_per_second
    return replace(scaled, inside=machine.inside.scale_times(slower))


def text_of(predictions: Sequence[Prediction], machine: Machine) -> Iterator[str]:
    """The record."""
    current = [p for p in predictions if p.use]
    yield "# Predicted and measured seconds"
    yield ""
    yield (
        f'One machine, `Machine.known("{machine.device}")`, for all rows of such GPUs, for those of H100s '
        '`Machine.known("H100")`, whose figures are of a data sheet; command: `make predictions`. Fitted to every '
        "second step of H200s, to single layers on four of them, and to the step in float8; all other rows are held "
        "out, except that what a forward pass takes of a layer's passes was read off the evaluations. A layer is one "
        "layer's attention, forward and backward. Measured figures are those of the records."
    )
    yield ""
    yield (
        "What limits the table: the terms of the cost were chosen with all rows in view, and only their figures are "
        "held out; steps with adapters are of 21 November and were not made again; the rate of towers was fitted to "
        "the older record with images before; of adapters the record has sums of rows, and their squares follow from "
        "its FLOPs. Two emulated nodes are predicted by the machine that was calibrated there, "
        "over links of 10 Gbit/s (two-nodes-10g-2xH100.md): without a limit the loopback between them differs by 10 %"
        " in the mean from one minute to the next. The share of kernels that shows beside slow exchanges was read off"
        " the layers there. No step over real hosts has a record; attention-full-size-4xH200 has errors "
        "and no times. Not priced: messages of tensor parallelism, that the last stage of a pipeline has the output "
        "head, and what the host takes for few rows, which is why layers of 16,384 rows under a window are given the "
        "host's measured seconds where these are more (attention-time-window-2xH100.md)."
    )
    yield ""
    yield "| rows | number | within 5 % | 10 % | 20 % | mean error |"
    yield "| --- | --- | --- | --- | --- | --- |"
    sets = {
        "whole training steps": [p for p in current if p.row.is_training_step],
        "of these held out": [p for p in current if p.row.is_training_step and p.use == "held out"],
        "of these made after the fit": [p for p in current if p.row.record in AFTER_FIT],
        "evaluations": [p for p in current if not p.row.is_training_step and not p.row.is_layer],
        "layers inside a host": [p for p in current if p.row.is_layer and "hosts of" not in p.row.settings],
        "layers over two hosts": [p for p in current if p.row.is_layer and "hosts of" in p.row.settings],
        "all": current,
    }
    for name, of_set in sets.items():
        if not of_set:
            yield f"| {name} | 0 | – | – | – | their records are older than the code |"
            continue
        counts = " | ".join(str(sum(p.within(bound) for p in of_set)) for bound in BOUNDS)
        error = sum(abs(p.ratio - 1) for p in of_set) / len(of_set)
        yield f"| {name} | {len(of_set)} | {counts} | {100 * error:.1f} % |"
    yield from ("", "Marked are rows that are more than 5 % off, of assumed figures more than 10 %:", "")
    yield from _table(current)
    yield from ("", "Older code, which does not count:", "")
    older = [p for p in predictions if not p.use]
    yield from _table(older)
    yield from ("", "Commands that make older rows again, where their record names one:", "")
    for name in dict.fromkeys(p.row.record for p in older):
        if command := record_command(name):
            yield f"- {name}: `{command}`"


def _table(predictions: Sequence[Prediction]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{' --- |' * len(COLUMNS)}"
    for prediction in predictions:
        row = prediction.row
        note = row.older or f"{prediction.use}{', **off**' if prediction.is_off else ''}"
        seconds = f"{row.seconds:.4g} | {prediction.seconds:.4g} | {prediction.ratio:.2f}"
        words = f"{row.record} | {row.model} | {row.slots} | {row.rows} | {row.kind} | {row.settings}"
        yield f"| {words} | {seconds} | {note} |"


def main() -> int:
    """Print and write the table; 1 if a row of the current code is off by more than its bound."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, default=RECORDS / "predictions.md")
    machine = Machine.known("H200")
    predictions = predict_all(machine)
    text = "\n".join(text_of(predictions, machine)) + "\n"
    print(text, end="")
    flags.parse_args().out.write_text(text)
    return int(any(p.is_off for p in predictions))


if __name__ == "__main__":
    sys.exit(main())

"""How good decisions by price are: every measured step and layer of bench/records beside what the planner says. No GPU.

    make predictions                                  # the tables, bench/records/predictions.md, status 1 off the bar
    python bench/plans/predictions.py --out /dev/null

The bar is what prices decide: of recorded plans, degrees and types of the same documents the one of least predicted
seconds takes at most 3 % longer than the best measured one; seconds are within 15 %, planned bytes within 10 %. One
machine, `Machine.known("H200")` or "H100", predicts all its rows, by the path that a run takes (`measured.py`). Rows of
older code stand apart with the reason, and do not count; so does one padded step of experts, whose plan nothing
chooses. A step that is measured anew (`bench/on_gpus.py`) becomes a row of bench/records/measured.json.
"""

import argparse
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measured import RECORDS, Measured, Peak, measured_peaks, measured_rows

from longspan.plain_text import gib_text, markdown_table
from longspan.plan import Machine
from longspan.plan.memory.settings import Bytes

REGRET = 0.03
SECONDS = 0.15
BYTES = 0.10
PLANS = re.compile(r"(fixed|dynamic|padded|degree \d+|at degree \d+)")  # words of settings that name a plan
COLUMNS = ("record", "model", "slots", "rows", "type", "settings", "measured s", "predicted s", "ratio", "")
PARTS = ("weights", "gradients", "states", "gathered", "kept", "work", "logits")  # of planned bytes


class Prediction(NamedTuple):
    """A measured row and its predicted seconds."""

    row: Measured
    seconds: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.row.seconds

    @property
    def is_off(self) -> bool:
        return not self.row.older and abs(self.ratio - 1) > SECONDS


class Choice(NamedTuple):
    """Plans, degrees or types of the same documents: the one of least predicted seconds, and the fastest measured."""

    chosen: Prediction
    best: Prediction
    plans: int
    regret: float

    @property
    def is_off(self) -> bool:
        return self.regret > REGRET


def predict_all(machine: Machine) -> list[Prediction]:
    """All rows in the order of records; those of another device by its figures of the data sheet."""
    machines = {"H200": machine, "H100": Machine.known("H100")}
    return [Prediction(row, row.predict(machines[row.device])) for row in measured_rows()]


def choices(predictions: Sequence[Prediction]) -> list[Choice]:
    """Every set of rows that count and differ only in plan, degree or type.

    Rows of equal predicted seconds are the same plan measured twice: the mean of their seconds counts.
    """
    sets = defaultdict[tuple[Any, ...], list[Prediction]](list)
    for prediction in predictions:
        row = prediction.row
        if not row.older:
            settings = PLANS.sub("", row.settings)
            sets[row.record, row.model, row.slots, row.rows, settings].append(prediction)
    found: list[Choice] = []
    for rows in sets.values():
        same = defaultdict[float, list[float]](list)
        for prediction in rows:
            same[prediction.seconds].append(prediction.row.seconds)
        measured = {seconds: statistics.mean(times) for seconds, times in same.items()}
        if len(measured) > 1:
            chosen = min(rows, key=lambda p: p.seconds)
            best = min(rows, key=lambda p: measured[p.seconds])
            regret = measured[chosen.seconds] / measured[best.seconds] - 1
            found.append(Choice(chosen, best, len(measured), regret))
    return found


def predict_peaks() -> list[tuple[Peak, Bytes]]:
    return [(peak, peak.moment()) for peak in measured_peaks()]


def peak_error(peak: Peak, moment: Bytes) -> float:
    """By how much of the measured bytes the plan is off."""
    return (moment.total - moment.communicators) / peak.measured - 1


def text_of(predictions: Sequence[Prediction], peaks: Sequence[tuple[Peak, Bytes]]) -> Iterator[str]:
    current = [p for p in predictions if not p.row.older]
    chosen = choices(predictions)
    errors = [abs(p.ratio - 1) for p in current]
    yield from ("# Predicted and measured", "", "Command: `make predictions`.", "")
    yield markdown_table(
        ("what", "bar", "rows", "within", "mean", "largest"),
        [
            _summary("chosen over best measured", REGRET, [choice.regret for choice in chosen]),
            _summary("seconds", SECONDS, errors),
            _summary("planned bytes", BYTES, [abs(peak_error(*pair)) for pair in peaks if not pair[0].older]),
        ],
    )
    yield from ("", "## Choices", "")
    yield markdown_table(
        ("record", "rows", "settings", "of", "chosen", "best", "regret", ""),
        [
            (
                *(c.best.row.record, c.best.row.rows, c.best.row.settings, str(c.plans)),
                *(_name(c.chosen), _name(c.best), f"{100 * c.regret:.1f} %", "**off**" * c.is_off),
            )
            for c in chosen
        ],
    )
    yield from ("", "## Seconds", "")
    yield (
        "A layer is one layer's attention, forward and backward. Two emulated nodes are predicted by the machine that "
        "was calibrated there, over links of 10 Gbit/s (two-nodes-10g-2xH100.md). No step over real hosts has a "
        "record. Not priced: messages of tensor parallelism, and that the last stage of a pipeline has the head."
    )
    yield ""
    yield from _table(current)
    yield from ("", "Older code, which does not count:", "")
    yield from _table([p for p in predictions if p.row.older])
    yield from ("", "## Peaks of memory", "")
    yield "GiB of torch's allocator, without context and communicators; the parts are those of the prediction."
    yield ""
    yield markdown_table(
        ("record", "row", "measured", "predicted", "off", *PARTS, ""), [_peak_row(*pair) for pair in peaks]
    )


def _peak_row(peak: Peak, moment: Bytes) -> tuple[str, ...]:
    error = peak_error(peak, moment)
    parts = (gib_text(getattr(moment, name)).removesuffix(" GiB") for name in PARTS)
    sizes = (f"{size / 2**30:.1f}" for size in (peak.measured, moment.total - moment.communicators))
    note = peak.older or "**off**" * (abs(error) > BYTES)
    return (peak.record, peak.name, *sizes, f"{100 * error:+.1f} %", *parts, note)


def _summary(name: str, bar: float, errors: Sequence[float]) -> tuple[str, ...]:
    within = sum(error <= bar for error in errors)
    numbers = (f"{100 * error:.1f} %" for error in (statistics.mean(errors or [0.0]), max(errors, default=0.0)))
    return (name, f"{100 * bar:.0f} %", str(len(errors)), str(within), *numbers)


def _name(prediction: Prediction) -> str:
    row = prediction.row
    return row.kind if row.is_layer else f"{row.kind} {' '.join(PLANS.findall(row.settings))}".strip()


def _table(predictions: Sequence[Prediction]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = []
    for prediction in predictions:
        row = prediction.row
        seconds = (f"{row.seconds:.4g}", f"{prediction.seconds:.4g}", f"{prediction.ratio:.2f}")
        note = row.older or "**off**" * prediction.is_off
        rows.append((row.record, row.model, str(row.slots), row.rows, row.kind, row.settings, *seconds, note))
    yield markdown_table(COLUMNS, rows)


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, default=RECORDS / "predictions.md")
    out = flags.parse_args().out
    predictions = predict_all(Machine.known("H200"))
    peaks = predict_peaks()
    text = "\n".join(text_of(predictions, peaks)) + "\n"
    print(text, end="")
    out.write_text(text)
    off = any(x.is_off for x in (*predictions, *choices(predictions)))
    off = off or any(abs(peak_error(*pair)) > BYTES for pair in peaks if not pair[0].older)
    return int(off)


if __name__ == "__main__":
    sys.exit(main())

"""Fit the figures of H200s to the measured rows that predictions.py calls "fitted". Needs no GPU; changes no source.

    python bench/plans/fit_figures.py                                    # all figures, two minutes
    python bench/plans/fit_figures.py --figures sharding_share,update_seconds --rounds 3 --out FILE

Figures are the floats of `MachineFigures` and the speeds of links inside a host: `inside` in bytes/s, and its factors
in `INSIDE_SPEEDS` as `inside_exchange` and `inside_gather`. In each round a change of every figure by 2 % tells how
rows depend on it. Then those changes are chosen, and made as far as they help, for which the score would be least if
logarithms were linear. The score is the mean over fitted rows of powers of the error (`POWER`, mostly of the largest,
and squares), and a pull towards the present figures, without which figures that no row tells apart would wander.
Held-out rows are predicted before and after, by the figures as printed, and nothing else.

What it prints is to be judged before it is written to machine_figures.py and links.py: a figure that was measured by
itself, or that a single row tells, is better left alone. Towers of images are priced by the present H200
(`EncoderShape.cost`), so their figures are not fitted, and neither are the constants of machine.py.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from measured import measured_rows
from numpy.typing import NDArray
from predictions import BOUNDS, Prediction, predict_all

from longspan.plain_text import markdown_table
from longspan.plan import Machine
from longspan.plan.cost.links import INSIDE_SPEEDS, Link

Floats = NDArray[np.float64]
POWER = 8  # of errors over the bound of predictions
SQUARES = 0.1  # weight of squares of the same
PULL = 0.1  # weight of the squares of figures' changes, in logarithms
PROBE = 0.02  # change of a figure's logarithm for its derivatives
ROUND_LIMIT, LIMIT = 0.2, 0.5  # largest change of a figure's logarithm in one round, and in all
LEAST_GAIN = 1e-3  # share of the score below which a round is the last


@dataclass(frozen=True)
class Fit:
    """Present and fitted figures by name, and `effects`: the change of rows' logarithms (row, figure) with theirs."""

    present: dict[str, float]
    fitted: dict[str, float]
    effects: Floats
    unused: tuple[str, ...]  # no fitted row depends on them


@dataclass(frozen=True)
class _Point:
    """Changes of figures (`moved`), and predicted over measured seconds of rows there (`errors`), in logarithms."""

    moved: Floats
    errors: Floats

    @property
    def score(self) -> float:
        """What is made least."""
        sizes = np.abs(self.errors) / BOUNDS[0]
        return float(np.mean(sizes**POWER + SQUARES * sizes**2) + PULL * self.moved @ self.moved)

    def __str__(self) -> str:
        """Score and errors, for a line of progress."""
        sizes = np.abs(np.exp(self.errors) - 1)
        return (
            f"score {self.score:.4f}, errors of fitted rows {sizes.mean():.2%} in the mean, {sizes.max():.2%} at most"
        )


def machine_figures(machine: Machine) -> dict[str, float]:
    """Return the figures that can be fitted, by name: those above 0, which have a logarithm."""
    speeds = {kind: wire.bytes_per_second for kind, wire in machine.inside.wires().items()}
    links = {f"inside_{kind}": speeds[kind] / speeds["point"] for kind in INSIDE_SPEEDS}
    return {name: x for name, x in (machine.rates() | {"inside": speeds["point"]} | links).items() if x > 0}


def replace_figures(machine: Machine, figures: dict[str, float]) -> Machine:
    """Return the machine with these figures, by the names of `machine_figures`."""
    rates = {name: value for name, value in figures.items() if not name.startswith("inside")}
    links = machine_figures(machine) | figures
    factors = {kind: links[f"inside_{kind}"] for kind in INSIDE_SPEEDS}
    return replace(machine, **rates, inside=Link.of(machine.inside.point.latency, links["inside"], factors))


def fit_figures(
    predictions: Sequence[Prediction],
    machine: Machine,
    names: Sequence[str] = (),
    *,
    rounds: int = 8,
    report: Callable[[str], None] = print,
) -> Fit:
    """Fit the figures `names` of the machine (none: all) to the rows whose use is "fitted"; see the module's text."""
    rows = [prediction.row for prediction in predictions if prediction.use == "fitted"]
    present = {name: value for name, value in machine_figures(machine).items() if not names or name in names}
    if missing := set(names) - set(present):
        raise SystemExit(f"no figures {', '.join(sorted(missing))}; use some of {', '.join(machine_figures(machine))}")

    def point_at(moved: Floats) -> _Point:
        changed = replace_figures(machine, _changed(present, moved))
        return _Point(moved, np.log([row.predict(changed) / row.seconds for row in rows]))

    point, effects = point_at(np.zeros(len(present))), np.zeros((len(rows), len(present)))
    used = np.zeros(len(present), dtype=bool)
    report(f"{len(rows)} fitted rows, {len(present)} figures; {point}")
    for number in range(1, rounds + 1):
        probes = [point_at(point.moved + probe).errors for probe in PROBE * np.eye(len(present))]
        effects = (np.stack(probes, axis=1) - point.errors[:, None]) / PROBE
        used |= (np.abs(effects) > 1e-9).any(axis=0)
        change, last = _solve_linear(point, effects, *_limits(present, point.moved)), point
        trials = (point_at(last.moved + share * change) for share in (1.0, 0.5, 0.25, 0.125))
        point = next((trial for trial in trials if trial.score < last.score), last)
        report(f"round {number}: {point}")
        if point.score > (1 - LEAST_GAIN) * last.score:
            report(f"nothing better by {LEAST_GAIN:.1%} is near, which ends the search")
            break
    unused = tuple(name for name, is_used in zip(present, used, strict=True) if not is_used)
    fitted = {name: float(f"{value:.3g}") for name, value in _changed(present, point.moved).items()}
    return Fit(present, fitted | {name: present[name] for name in unused}, effects, unused)


def _limits(present: dict[str, float], moved: Floats) -> tuple[Floats, Floats]:
    """The least and the largest changes of logarithms in the next round; a share is 1 at most."""
    most = [min(LIMIT, -np.log(value)) if name.endswith("_share") else LIMIT for name, value in present.items()]
    return np.maximum(-LIMIT - moved, -ROUND_LIMIT), np.minimum(np.array(most) - moved, ROUND_LIMIT)


def _changed(present: dict[str, float], moved: Floats) -> dict[str, float]:
    return {name: value * float(np.exp(x)) for (name, value), x in zip(present.items(), moved, strict=True)}


def _solve_linear(point: _Point, effects: Floats, low: Floats, high: Floats) -> Floats:
    """Return the change within `low` and `high` of least score where errors change by `effects`: Newton's method."""
    change, bound, count = np.zeros(len(low)), BOUNDS[0], len(effects)
    for _ in range(100):
        sizes = (point.errors + effects @ change) / bound
        slopes = (POWER * sizes ** (POWER - 1) + 2 * SQUARES * sizes) / (bound * count)
        curves = (POWER * (POWER - 1) * sizes ** (POWER - 2) + 2 * SQUARES) / (bound**2 * count)
        gradient = effects.T @ slopes + 2 * PULL * (point.moved + change)
        hessian = effects.T @ (curves[:, None] * effects) + 2 * PULL * np.eye(len(low))
        step = _solve_bounded(gradient, hessian, low - change, high - change)
        if np.abs(step).max() < 1e-6:
            break
        change = np.clip(change + step, low, high)
    return change


def _solve_bounded(gradient: Floats, hessian: Floats, low: Floats, high: Floats) -> Floats:
    """Return where a convex quadratic is least between `low` and `high`, by one number after the other."""
    step = np.zeros(len(gradient))
    for _ in range(1000):
        last = step.copy()
        for i in range(len(step)):
            step[i] = np.clip(step[i] - (gradient[i] + hessian[i] @ step) / hessian[i, i], low[i], high[i])
        if np.abs(step - last).max() < 1e-9:
            break
    return step


def figure_rows(fit: Fit) -> Iterator[tuple[str, ...]]:
    """Rows of the table of figures; the rows that a figure moves follow from the last round's derivatives."""
    for (name, value), effect in zip(fit.present.items(), np.abs(fit.effects).T, strict=True):
        fitted = fit.fitted[name]
        cells = (f"{fitted:.4g}", f"{fitted / value - 1:+.1%}", _count_moved(effect, fitted / value))
        words = ("–", "left alone: no fitted row depends on it", "0") if name in fit.unused else cells
        yield name, f"{value:.4g}", *words, _count_moved(effect, 1.1)


def _count_moved(effect: Floats, factor: float) -> str:
    """The rows that a figure times `factor` moves by more than 1 %."""
    return str(int((effect * abs(np.log(factor)) > 0.01).sum()))


def error_rows(before: Sequence[Prediction], after: Sequence[Prediction]) -> Iterator[tuple[str, ...]]:
    """Rows of the table of errors: fitted rows, and held-out ones by GPU."""
    for use, device in sorted({(p.use, p.row.device) for p in before if p.use}):
        for word, predictions in (("before", before), ("after", after)):
            sizes = [abs(p.ratio - 1) for p in predictions if (p.use, p.row.device) == (use, device)]
            off = sum(size > BOUNDS[0] for size in sizes)
            yield f"{use}, {device}", word, str(len(sizes)), f"{np.mean(sizes):.2%}", f"{max(sizes):.2%}", str(off)


def main() -> None:
    """Fit, and print both tables."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rounds", type=int, default=8, help="at most so many")
    flags.add_argument("--figures", default="", help="names with commas between them; all others stay as they are")
    flags.add_argument("--out", type=Path, help="write the tables to this file too")
    options = flags.parse_args()
    if options.rounds < 1:
        flags.error(f"--rounds {options.rounds} would fit nothing; give 1 or more")
    if options.out and not options.out.parent.is_dir():
        flags.error(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
    machine, rows = Machine.known("H200"), measured_rows()
    before = predict_all(machine, rows)
    fit = fit_figures(before, machine, [name for name in options.figures.split(",") if name], rounds=options.rounds)
    after = predict_all(replace_figures(machine, fit.fitted), rows)
    figures = ("figure", "present", "fitted", "change", "rows that this moves by 1 %", "that 10 % would")
    errors = ("rows", "figures", "number", "mean error", "largest", "over 5 %")
    tables = (markdown_table(figures, list(figure_rows(fit))), markdown_table(errors, list(error_rows(before, after))))
    text = "\n" + "\n\n".join(tables) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text.lstrip())


if __name__ == "__main__":
    main()

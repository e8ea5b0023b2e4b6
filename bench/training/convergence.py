"""Loss curves of padded, fixed and dynamic plans: the same text, documents and seeds, step by step. Needs no GPU.

    python bench/training/convergence.py --out bench/records/convergence.json --plot docs/convergence.svg  # 30 minutes
    python bench/training/convergence.py --recipes sgd:float32:0.3 --steps 20 --out /tmp/convergence.json  # a part
    python bench/training/convergence.py --draw bench/records/convergence.json --plot docs/convergence.svg  # no run
    python bench/training/convergence.py --preset qwen3-moe-tiny --world 2 --steps 300 \
        --recipes adamw:float32:0.001,adamw:bfloat16:0.001 --out bench/records/convergence-experts.json

A recipe is an optimizer, a dtype (bfloat16: of the arithmetic) and a learning rate; each of its three runs is
`longspan train examples/first.toml --world 4` with another `context.planner`, over the same documents, which is
checked. The difference of a step is that of its highest and its lowest loss. Recipes that `--out` holds already are
kept. The command fails where a difference exceeds `--bound`, but for bfloat16, whose rounding differs, and for AdamW at
6e-3, which magnifies any difference about tenfold every four steps.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import svg_curves

from longspan.cli.machine import machine_facts, machine_text
from longspan.versions import versions

ROOT = Path(__file__).parents[2]
PLANNERS = ("padded", "fixed", "dynamic")
DTYPES = ("float32", "float64", "bfloat16")
OPTIMIZERS = ("adamw", "sgd")
UNSTABLE = "adamw:float32:0.006"
RECIPES = f"adamw:float64:0.001,adamw:float32:0.001,sgd:float32:0.3,{UNSTABLE}"
COLOURS = {"padded": "#8d99ae", "fixed": "#e07a1f", "dynamic": svg_curves.BLUE}
WIDTHS = {"padded": 7.0, "fixed": 4.0, "dynamic": 1.5}  # curves that lie on each other stay visible


@dataclass(frozen=True)
class Recipe:
    """What the three runs of a comparison share."""

    optimizer: str
    dtype: str
    lr: float

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """A recipe such as adamw:float64:1e-3."""
        optimizer, dtype, lr = [*text.split(":"), "", ""][:3]
        if optimizer not in OPTIMIZERS or dtype not in DTYPES:
            sys.exit(f"recipe {text!r} is not OPTIMIZER:DTYPE:RATE, such as adamw:float64:1e-3")
        return cls(optimizer, dtype, float(lr))

    @property
    def name(self) -> str:
        return f"{self.optimizer}:{self.dtype}:{self.lr:g}"

    @property
    def title(self) -> str:
        return f"{self.optimizer} in {self.dtype}, learning rate {self.lr:g}"


def curve(planner: str, recipe: Recipe, flags: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    values = {
        "context.planner": planner,
        "evaluation.documents": 0,
        "model.preset": flags.preset,
        "model.dtype": "float32" if recipe.dtype == "bfloat16" else recipe.dtype,
        "model.compute_dtype": recipe.dtype,
        "optimizer.class": recipe.optimizer,
        "optimizer.lr": recipe.lr,
        "train.steps": flags.steps,
        "optimizer.warmup_steps": flags.steps // 4,
        "run.dir": folder / f"{recipe.name.replace(':', '-')}-{planner}",
        "world": flags.world,
        "device": flags.device,
    }
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "longspan", "train", str(ROOT / "examples/first.toml")]
    subprocess.run([*command, *words], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = (Path(values["run.dir"]) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def compared(curves: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    for rows in zip(*curves.values(), strict=True):
        seen = {(row["step"], row["tokens"], row["targets"]) for row in rows}
        if len(seen) != 1:
            sys.exit(f"the runs trained on other documents: (step, tokens, targets) {sorted(seen)}")
    losses = {planner: [row["loss"] for row in rows] for planner, rows in curves.items()}
    apart = [max(step) - min(step) for step in zip(*losses.values(), strict=True)]
    return {
        "losses": losses,
        "difference": apart,
        "largest_difference": max(apart),
        "micro_batches": {planner: sum(row["micro_batches"] for row in rows) for planner, rows in curves.items()},
        "tokens_per_second": {planner: _tokens_per_second(rows) for planner, rows in curves.items()},
    }


def _tokens_per_second(rows: Sequence[dict[str, Any]]) -> float:
    """Of all steps after the first, which warms up."""
    return sum(row["tokens"] for row in rows[1:]) / max(1e-9, sum(row["seconds"] for row in rows[1:]))


def markdown(record: dict[str, Any]) -> str:
    lines = ["# Convergence: padded, fixed and dynamic plans of the same documents", ""]
    lines += [f"Machine: {machine_text(record['machine'])}. Versions: {record['versions']}. {record['note']}", ""]
    for name, comparison in record["recipes"].items():
        largest = comparison["largest_difference"]
        bound = record["bound"]
        at = comparison["difference"].index(largest) + 1
        lines += [f"## {Recipe.parse(name).title}", "", f"Command: `{comparison['command']}`.", ""]
        past = next((step for step, d in enumerate(comparison["difference"], 1) if d > bound), None)
        above = f"first above {bound:g} at step {past}" if past else f"never above {bound:g}"
        lines += [f"Largest difference of a step: {largest:.1e} (step {at}); {above}.", ""]
        batches = ", ".join(f"{planner} {count}" for planner, count in comparison["micro_batches"].items())
        speeds = comparison.get("tokens_per_second", {})
        shown = "".join(f"; {planner} {speed:,.0f} tokens/s" for planner, speed in speeds.items())
        lines += [f"Micro-batches of all steps: {batches}{shown}.", ""]
        lines += [
            f"| step | {' | '.join(comparison['losses'])} | difference |",
            "| --- " * (2 + len(comparison["losses"])) + "|",
        ]
        lines += [
            f"| {step} | {' | '.join(f'{loss:.7f}' for loss in losses)} | {apart:.1e} |"
            for step, (*losses, apart) in enumerate(
                zip(*comparison["losses"].values(), comparison["difference"], strict=True), 1
            )
        ]
        lines.append("")
    return "\n".join(lines)


def plot(record: dict[str, Any]) -> str:
    """One SVG: for each recipe its curves of loss above, and below how far apart they are, logarithmic; two a row."""
    recipes = len(record["recipes"])
    size = f"{470 * min(recipes, 2)} {430 * math.ceil(recipes / 2)}"
    parts = list[str]()
    for place, (name, comparison) in enumerate(record["recipes"].items()):
        parts.append(f'<g transform="translate({470 * (place % 2)} {430 * (place // 2)})">')
        parts += _losses(Recipe.parse(name).title, comparison["losses"])
        parts += _differences(comparison["difference"], record["bound"])
        parts.append("</g>")
    return svg_curves.document(size, "Loss of padded, fixed and dynamic plans on the same documents", parts)


def _losses(title: str, losses: Mapping[str, Sequence[float]]) -> Iterator[str]:
    values = [value for curve in losses.values() for value in curve]
    low, high = math.floor(2 * min(values)) / 2, math.ceil(2 * max(values)) / 2
    yield svg_curves.text(title, 60, 17, "start", weight="600")
    for i in range(round(2 * (high - low)) + 1):
        y = 240 - 200 * i / (2 * (high - low))
        yield svg_curves.line(y, svg_curves.GRID) + svg_curves.text(f"{low + i / 2:g}", 52, y + 4, "end")
    for place, (planner, curve) in enumerate(losses.items()):
        points = [
            (x, 240 - 200 * (y - low) / (high - low)) for x, y in zip(svg_curves.across(len(curve)), curve, strict=True)
        ]
        yield svg_curves.curve(points, COLOURS[planner], WIDTHS[planner])
        yield svg_curves.curve([(300, 62 + 18 * place), (326, 62 + 18 * place)], COLOURS[planner], WIDTHS[planner])
        yield svg_curves.text(planner, 334, 66 + 18 * place, "start")
    yield svg_curves.text("loss, nats per predicted token", 454, 35, "end", fill=svg_curves.SOFT)


def _differences(apart: Sequence[float], bound: float) -> Iterator[str]:
    low, high = -15, -1
    for power in range(low, high + 1, 2):
        y = 380 - 110 * (power - low) / (high - low)
        yield svg_curves.line(y, svg_curves.GRID) + svg_curves.text(f"1e{power}", 52, y + 4, "end")
    y = 380 - 110 * (math.log10(bound) - low) / (high - low)
    yield svg_curves.line(y, svg_curves.RED)
    yield svg_curves.curve([(60, 258), (86, 258)], svg_curves.RED, 1) + svg_curves.text(
        f"bound {bound:g}", 94, 262, "start", fill=svg_curves.RED
    )
    heights = [380 - 110 * (min(max(math.log10(max(d, 1e-99)), low), high) - low) / (high - low) for d in apart]
    yield svg_curves.curve(list(zip(svg_curves.across(len(apart)), heights, strict=True)), svg_curves.INK, 1.5)
    yield svg_curves.text("highest − lowest loss of the three", 454, 262, "end", fill=svg_curves.SOFT)
    yield svg_curves.text("step 1", 60, 402, "start") + svg_curves.text(f"step {len(apart)}", 454, 402, "end")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--preset", default="qwen3-tiny", help="the model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--recipes", default=RECIPES, help="optimizer:dtype:rate, …")
    parser.add_argument("--bound", type=float, default=1e-4, help="most that the losses of one step may differ")
    parser.add_argument("--out", type=Path, help="a .json file; the table goes beside it")
    parser.add_argument("--plot", type=Path, help="an .svg file")
    parser.add_argument("--draw", type=Path, help="run nothing: draw this record to --plot")
    flags = parser.parse_args()
    if flags.draw:
        if not flags.plot or not flags.draw.is_file():
            sys.exit(f"--draw {flags.draw} --plot {flags.plot}: give a record that is there, and an .svg file for it")
        flags.plot.write_text(plot(json.loads(flags.draw.read_text())))
        return
    recipes = {recipe.name: recipe for recipe in map(Recipe.parse, flags.recipes.split(","))}
    comparisons = json.loads(flags.out.read_text())["recipes"] if flags.out and flags.out.is_file() else {}
    with TemporaryDirectory() as folder:
        for name, recipe in recipes.items():
            comparisons[name] = comparisons.get(name) or _run(recipe, flags, Path(folder))
            _write(flags, {name: comparisons[name] for name in [*recipes, *comparisons] if name in comparisons})
    bounded = [name for name in recipes if name != UNSTABLE and ":bfloat16:" not in name]
    over = [name for name in bounded if comparisons[name]["largest_difference"] > flags.bound]
    if over:
        sys.exit(f"losses of a step differ by more than {flags.bound:g}: {', '.join(over)}")


def _run(recipe: Recipe, flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = "" if flags.preset == "qwen3-tiny" else f" --preset {flags.preset}"
    device = "" if flags.device == "cpu" else f" --device {flags.device}"
    numbers = f"--world {flags.world} --steps {flags.steps} --recipes {recipe.name}"
    command = f"python bench/training/convergence.py{model}{device} {numbers}"
    curves = {planner: curve(planner, recipe, flags, folder) for planner in PLANNERS}
    comparison = {"command": command} | compared(curves)
    print(f"{recipe.name}: largest difference of a step {comparison['largest_difference']:.1e}", flush=True)
    return comparison


def _write(flags: argparse.Namespace, comparisons: dict[str, Any]) -> None:
    record = {
        "bench": "convergence",
        "machine": machine_facts(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "note": (
            f"{flags.preset} on {flags.world} {'CPU processes' if flags.device == 'cpu' else 'GPUs'}, "
            "examples/first.toml but for planner, optimizer, rate, dtype and steps (a quarter of them warm-up): "
            "sources of Python's standard library, seed 0, cp 2 where fixed."
        ),
        "bound": flags.bound,
        "recipes": comparisons,
    }
    if flags.out:
        flags.out.write_text(json.dumps(record, indent=1) + "\n")
        flags.out.with_suffix(".md").write_text(markdown(record))
    if flags.plot:
        flags.plot.write_text(plot(record))


if __name__ == "__main__":
    main()

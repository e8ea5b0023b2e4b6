"""Loss curves of one model in float32, mixed precision, float8, and bfloat16 with and without stochastic rounding.

    python bench/training/precision.py --out bench/records/precision.json --plot docs/precision.svg   # about 20 minutes
    python bench/training/precision.py --draw bench/records/precision.json --plot docs/precision.svg  # runs nothing

From a preset that `longspan train` has trained in float32 every precision trains on the same documents at the low rate
of fine-tuning, in one process, on a GPU if there is one; each seed is another order of documents. A curve is how far
the loss of a step's documents is below the start's on the same documents, over `--window` steps. Its distance from
float32's at the worst step is in shares of float32's fall at the end. The command fails unless mixed precision and
float8 (where the device has it) stay within 2 % for every seed, and pure bfloat16 does not.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import svg_curves
import torch

from longspan.cli.machine import machine_facts, machine_text
from longspan.comm import World
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.step_order import StepOrder
from longspan.layout import Layout
from longspan.model.float8_layers import float8_device_reason
from longspan.plain_text import markdown_table
from longspan.plan import Cost
from longspan.train.run_model.load import load_run_model, read_model_configuration
from longspan.train.run_model.prepare import prepare_run_model
from longspan.train.step import run_step
from longspan.train.training import Training, build_run_optimizer
from longspan.versions import versions

BOUND = 0.02
START = "start"
PRECISIONS: dict[str, dict[str, object]] = {
    "float32": {"model.dtype": "float32", "model.compute_dtype": "float32"},
    "mixed": {"model.dtype": "float32", "model.compute_dtype": "bfloat16"},
    "mixed, float8": {"model.dtype": "float32", "model.compute_dtype": "bfloat16", "train.float8": "rowwise"},
    "bfloat16": {"model.dtype": "bfloat16"},
    "bfloat16, stochastic rounding": {"model.dtype": "bfloat16", "optimizer.stochastic_rounding": True},
}
STYLES = {  # colour and width; curves that lie on each other stay visible
    "float32": ("#8d99ae", 8.0),
    "mixed": (svg_curves.BLUE, 1.2),
    "mixed, float8": ("#e09f3e", 2.6),
    "bfloat16": (svg_curves.RED, 2.0),
    "bfloat16, stochastic rounding": ("#2a9d8f", 4.0),
}
ONE_SLOT = {
    "evaluation.documents": 0,
    "data.max_document_tokens": 256,
    "context.context_parallel_size": 1,
    "context.max_tokens_per_slot": 0,
}


def start(flags: argparse.Namespace, folder: Path) -> Path:
    run = folder / "start"
    values = ONE_SLOT | {"run.dir": run, "train.steps": flags.start_steps, "train.tokens_per_step": flags.tokens}
    values |= {"optimizer.lr": 3e-3, "optimizer.warmup_steps": 20, "model.compute_dtype": "float32"}
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    subprocess.run([sys.executable, "-m", "longspan", "train", *words], check=True, stdout=sys.stderr)
    return run


def curve(config: RunConfig, corpus: Corpus, world: World, *, trains: bool = True) -> list[float]:
    model = prepare_run_model(config, world, load_run_model(config, read_model_configuration(config, 0)))
    world.seed = config.train.seed
    training = Training(config, world, model, build_run_optimizer(config, world, model), Cost())
    order = StepOrder(
        corpus.lengths, tokens_per_step=config.train.tokens_per_step, seed=config.train.seed, eval_documents=0
    )
    losses = []
    for step in range(config.train.steps):
        documents = corpus.select(order.documents_of_step(step))
        plan = training.training_choice.plan([len(documents[i]) for i in range(len(documents))], world.home)
        if trains:
            losses.append(training.take_step(plan, documents, step).loss)
        else:
            losses.append(run_step(model, plan, documents, world, backward=False).loss)
    return losses


def curves(flags: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    run = start(flags, folder)
    corpus = Corpus(run / "corpus")
    shared = ONE_SLOT | {"model.path": str(run / "model"), "train.steps": flags.steps, "optimizer.lr": flags.lr}
    shared |= {"optimizer.lr_schedule": "constant", "optimizer.warmup_steps": 10, "train.tokens_per_step": flags.tokens}
    losses: dict[str, dict[str, list[float]]] = {}
    with World(Layout(1), backend=None if torch.cuda.is_available() else "gloo") as world:
        for seed in range(1, flags.seeds + 1):
            of_seed = losses.setdefault(str(seed), {})
            for name, keys in ({START: PRECISIONS["float32"]} | PRECISIONS).items():
                if "train.float8" in keys and float8_device_reason(world.device):
                    print(f"seed {seed}, {name}: {float8_device_reason(world.device)}", file=sys.stderr, flush=True)
                    continue
                config = load_config(None, shared | keys | {"train.seed": seed})
                of_seed[name] = curve(config, corpus, world, trains=name != START)
                of_name = {} if name == START else measured(of_seed, name, flags.window)
                print(f"seed {seed}, {name}: {of_name}", file=sys.stderr, flush=True)
    return losses


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    return [math.fsum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]


def falls(losses: Mapping[str, Sequence[float]], window: int) -> dict[str, list[float]]:
    """How far each smoothed curve is below that of the start on the same documents."""
    start = losses[START]
    return {
        name: smoothed([before - loss for before, loss in zip(start, values, strict=True)], window)
        for name, values in losses.items()
        if name != START
    }


def measured(losses: Mapping[str, Sequence[float]], name: str, window: int) -> dict[str, float]:
    """The fall of a curve, and its distance from float32's at the worst step, in nats and in shares of that fall."""
    by_name = falls({key: losses[key] for key in (START, "float32", name)}, window)
    apart = max(abs(a - b) for a, b in zip(by_name["float32"], by_name[name], strict=True))
    fall = by_name["float32"][-1]
    return {"apart": apart, "fall": by_name[name][-1], "fall_of_float32": fall, "share": apart / fall}


def markdown(record: Mapping[str, Any]) -> str:
    rows = [
        (seed, name, f"{values['fall']:.4f}", f"{100 * values['share']:.2f} %")
        for seed, of_seed in record["measured"].items()
        for name, values in of_seed.items()
    ]
    table = markdown_table(("seed", "precision", "fall", "of float32's fall, at most apart"), rows)
    title = "# Precision: the same documents in float32, mixed precision and bfloat16"
    origin = f"Machine: {machine_text(record['machine'])}. Versions: {record['versions']}."
    return "\n\n".join([title, origin, record["note"], f"Command: `{record['command']}`.", table]) + "\n"


# ---- the figure


def plot(record: Mapping[str, Any]) -> str:
    window = record["window"]
    losses = record["losses"]
    first = falls(next(iter(losses.values())), window)
    parts = ["<g>", *_falls(first, record), "</g>", '<g transform="translate(470 0)">', *_shares(record), "</g>"]
    return svg_curves.document("940 420", "Loss in float32, mixed precision and bfloat16", parts)


def _falls(curves: Mapping[str, Sequence[float]], record: Mapping[str, Any]) -> Iterator[str]:
    values = [value for curve in curves.values() for value in curve]
    high = math.ceil(50 * max(values)) / 50
    yield svg_curves.text(
        f"Fall of the loss on the same documents, nats (first of {len(record['losses'])} seeds)",
        60,
        22,
        "start",
        weight="600",
    )
    for i in range(5):
        y = 370 - 80 * i
        yield svg_curves.line(y, svg_curves.GRID) + svg_curves.text(f"{high * i / 4:.3f}", 52, y + 4, "end")
    for name, curve in sorted(curves.items(), key=lambda one: -STYLES[one[0]][1]):
        colour, width = STYLES[name]
        heights = [370 - 320 * value / high for value in curve]
        yield svg_curves.curve(list(zip(svg_curves.across(len(curve)), heights, strict=True)), colour, width)
    for place, name in enumerate(curves):
        colour, width = STYLES[name]
        yield svg_curves.curve([(76, 62 + 18 * place), (102, 62 + 18 * place)], colour, width)
        yield svg_curves.text(name, 110, 66 + 18 * place, "start")
    yield from _steps(record["window"], record["losses"])


def _shares(record: Mapping[str, Any]) -> Iterator[str]:
    low, high = -1, 2  # powers of ten, in percent
    yield svg_curves.text("Distance from float32's curve, % of its fall", 60, 22, "start", weight="600")
    for power in range(low, high + 1):
        y = 370 - 320 * (power - low) / (high - low)
        yield svg_curves.line(y, svg_curves.GRID) + svg_curves.text(f"{10.0**power:g}", 52, y + 4, "end")
    y = 370 - 320 * (math.log10(100 * record["bound"]) - low) / (high - low)
    yield svg_curves.line(y, svg_curves.INK) + svg_curves.text(f"bound {100 * record['bound']:g} %", 454, y - 5, "end")
    for of_seed in record["losses"].values():
        by_name = falls(of_seed, record["window"])
        reference = by_name.pop("float32")
        for name, curve in by_name.items():
            colour, _ = STYLES[name]
            apart = [abs(a - b) for a, b in zip(reference, curve, strict=True)]
            fall = reference[-1]
            powers = [min(max(math.log10(max(100 * d / fall, 1e-9)), low), high) for d in apart]
            heights = [370 - 320 * (power - low) / (high - low) for power in powers]
            yield svg_curves.curve(list(zip(svg_curves.across(len(apart)), heights, strict=True)), colour, 1.2)
    yield from _steps(record["window"], record["losses"])


def _steps(window: int, losses: Mapping[str, Any]) -> Iterator[str]:
    steps = len(next(iter(losses.values()))[START])
    yield svg_curves.text(f"steps 1 to {window}", 60, 396, "start", fill=svg_curves.SOFT)
    yield svg_curves.text(f"steps {steps - window + 1} to {steps}", 454, 396, "end", fill=svg_curves.SOFT)


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start-steps", type=int, default=150, help="steps in float32 that all start from")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a step, about")
    parser.add_argument("--lr", type=float, default=4e-5)
    parser.add_argument("--window", type=int, default=25, help="steps over which curves are smoothed")
    parser.add_argument("--out", type=Path, help="a .json file; the table goes beside it")
    parser.add_argument("--plot", type=Path, help="an .svg file")
    parser.add_argument("--draw", type=Path, help="run nothing: draw this record to --plot")
    flags = parser.parse_args()
    if not flags.draw:
        with TemporaryDirectory() as folder:
            record = _record(flags, curves(flags, Path(folder)))
    else:
        record = json.loads(flags.draw.read_text())
    if flags.out:
        flags.out.write_text(json.dumps(record) + "\n")
        flags.out.with_suffix(".md").write_text(markdown(record))
    if flags.plot:
        flags.plot.write_text(plot(record))
    shares = dict[str, list[float]]()
    for name, values in (pair for of_seed in record["measured"].values() for pair in of_seed.items()):
        shares.setdefault(name, []).append(values["share"])
    near = max(share for name, of_name in shares.items() if name.startswith("mixed") for share in of_name)
    if near > BOUND or min(shares["bfloat16"]) <= BOUND:
        sys.exit(f"mixed precision must stay within {BOUND:g} of the fall, and pure bfloat16 must not: {shares}")


def _record(flags: argparse.Namespace, losses: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    window = flags.window
    return {
        "bench": "precision",
        "command": f"python bench/training/precision.py --steps {flags.steps} --seeds {flags.seeds} "
        f"--tokens {flags.tokens} --start-steps {flags.start_steps} --lr {flags.lr:g}",
        "machine": machine_facts(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "note": f"qwen3-tiny, {flags.start_steps} steps old, goes on for {flags.steps} steps of about {flags.tokens} "
        f"tokens with AdamW at {flags.lr:g}; sources of Python's standard library, {flags.seeds} orders of documents; "
        f"curves are means over {window} steps.",
        "bound": BOUND,
        "window": window,
        "losses": losses,
        "measured": {
            seed: {name: measured(of_seed, name, window) for name in PRECISIONS if name in of_seed}
            for seed, of_seed in losses.items()
        },
    }


if __name__ == "__main__":
    main()

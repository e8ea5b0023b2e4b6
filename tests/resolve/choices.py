"""Runs whose choices are pinned in choices.json: recipes on 4 and 8 GPUs, measured steps, and steps of 1M tokens.

    python -m tests.resolve.choices [NAME ...]

prints what is chosen today for the cases whose names begin so, and writes it to the file. Nothing is downloaded.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from bench.plans import measured, recipes

from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.data.run_epochs import most_step_tokens, with_epoch_steps
from longspan.data.run_order import order_lengths
from longspan.errors import LongspanError
from longspan.layout import Layout
from longspan.plan import MemoryBudget
from longspan.plan.cost.machine import Machine
from longspan.plan.distributions import sample_lengths
from longspan.plan.memory.settings import GPU_SHARE
from longspan.resolve.evaluation import plan_type_text
from longspan.resolve.facts import Facts
from longspan.resolve.planner_config import PlannerConfig
from longspan.resolve.resolved import resolve
from longspan.resolve.ways import Way

FILE = Path(__file__).with_name("choices.json")
HOST = 128 << 30  # bytes of the host for a GPU
PLACES = (("h100", 8), ("h200", 4), ("h200", 8))  # GPUs of the recipes
IMAGE_ROWS = 256 * recipes.IMAGES  # of a chat with images


@dataclass(frozen=True)
class Case:
    """A run: its configuration, the model's, the GPUs, and its documents (of all steps, or of each in turn)."""

    name: str
    config: RunConfig
    model: Any
    home: Layout
    gpu: str
    lengths: Sequence[int] = ()
    steps: Sequence[Sequence[int]] = ()
    image_rows: float = 0.0  # of a token

    @property
    def machine(self) -> Machine:
        return Machine.known(self.gpu)

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget(device=int(GPU_SHARE * self.machine.memory_bytes), host=HOST)


def cases() -> Iterator[Case]:
    yield from _recipes()
    yield from _measured_steps()
    yield from _million_tokens()


def _recipes() -> Iterator[Case]:
    for path in sorted(recipes.FOLDER.glob("*.toml")):
        images, config = "-vl-" in path.stem, load_config(path)
        shortest, longest, count = recipes.MADE[path.stem.rpartition("-")[2]]
        draw = Random(0)
        lengths = [
            longest if i % 12 == 0 else round(shortest * (longest / shortest) ** draw.random()) for i in range(count)
        ]
        lengths = [max(n, 4096) if images else n for n in lengths]
        share = IMAGE_ROWS * count / sum(lengths) if images else 0.0
        for gpu, gpus in PLACES:
            run = replace(config, run=replace(config.run, machine=gpu))
            model = _family(Path(config.model.path).name)
            yield Case(f"{path.stem}, {gpus} {gpu}", run, model, Layout(gpus), gpu, lengths, (), share)


@cache
def _family(name: str) -> Any:
    import transformers

    from longspan.model.presets import preset_config

    if name not in recipes.FAMILIES:
        return preset_config(name.lower())
    kind, values = recipes.FAMILIES[name]
    return getattr(transformers, kind)(**values)


def _measured_steps() -> Iterator[Case]:
    known, values = set[str](), json.loads((measured.RECORDS / "measured.json").read_text())
    for row in measured.measured_rows():
        if not row.is_training_step or not {"config", "planner"} <= row.by.keys() or "images" in row.by:
            continue
        of_documents = row.by["lengths"]
        lengths = values["documents"][of_documents] if isinstance(of_documents, str) else of_documents
        home = Layout(**row.by["layout"])
        text = of_documents if isinstance(of_documents, str) else f"{len(lengths)} of {sum(lengths):,} tokens"
        name = f"{row.by['config'].replace(' of ', ', ')}, {len(home.ranks)} {row.device.lower()}, pp {home.pp}: {text}"
        model = measured._config(row.by["config"])
        if name in known or isinstance(model, Path):
            continue
        known.add(name)
        keys = {"model.config": "of a record", "optimizer.lr": 1e-5, "train.steps": 1}
        keys |= {
            "run.machine": row.device.lower(),
            "parallel.tp": home.tp,
            "parallel.pp": home.pp,
            "parallel.ep": home.ep,
        }
        yield Case(name, load_config(None, keys), model, home, row.device.lower(), steps=[lengths])


FAIR = [*((name, "h100") for name in ("lognorm", "bimodal", "uniform", "expo", "files")), ("lognorm", "h200")]
FAIR += [("bimodal", "h200")]


def _million_tokens() -> Iterator[Case]:
    model = _family("Qwen3-8B")
    for name, gpu in FAIR:
        steps = [sample_lengths(name, 1 << 20, seed=seed).tolist() for seed in range(8)]
        keys = {"model.config": "Qwen3-8B", "optimizer.lr": 1e-5, "train.steps": 8, "run.machine": gpu}
        yield Case(f"fair: {name}, 8 {gpu}", load_config(None, keys), model, Layout(8), gpu, steps=steps)


def facts_of(case: Case) -> tuple[RunConfig, Facts]:
    """The configuration of a case with its number of steps, and the facts by which a run resolves it."""
    config, home = case.config, case.home
    config = replace(config, context=replace(config.context, node_size=max(1, case.machine.node_size // home.tp)))
    more: dict[str, Any] = {"budget": case.budget, "machine": case.machine, "home": home, "model": case.model}
    if case.steps:
        steps, longest = case.steps, max(map(max, case.steps))
        lengths_of_step = lambda step: steps[step % len(steps)]  # noqa: E731
        return config, Facts(lengths_of_step=lengths_of_step, steps=config.train.steps, longest=longest, **more)
    order = order_lengths(config, np.asarray(case.lengths))
    config = with_epoch_steps(config, order, lambda line: None)
    held_out = set(order.evaluation)
    longest = max(n for i, n in enumerate(case.lengths) if i not in held_out)
    image_rows = case.image_rows * most_step_tokens(config, order)
    more |= {"longest": longest, "image_rows": image_rows, "steps": config.train.steps}
    return config, Facts(lengths_of_step=order.lengths_of_step, **more)


def choose(case: Case) -> dict[str, Any]:
    """What a run of this case chooses; "refused" where it is refused. The seconds are those of its first four steps."""
    config, facts = facts_of(case)
    try:
        resolved = resolve(config, facts)
    except LongspanError as error:
        return {"refused": re.sub(r" \(.*", "", str(error))}
    way, memory, context = Way(resolved.config, facts), resolved.memory, resolved.config.context
    assert memory is not None
    choice = PlannerConfig.training(resolved.config, cost=resolved.cost, heads=facts.heads)
    plans = [choice.plan(facts.lengths(step), facts.home) for step in range(4)]
    return {
        "planner": context.planner,
        "degree": context.context_parallel_size if choice.has_one_degree else 0,
        "type": "; ".join(dict.fromkeys(filter(None, map(plan_type_text, plans)))),
        "rows": context.max_tokens_per_slot,
        "mode": context.mode,
        "partition": context.partition,
        "checkpoint_policies": policies_text(memory),
        "device": memory.device.total,
        "host": memory.host.total,
        "seconds": float(f"{way.step_seconds(plans, memory):.6g}"),
    }


def policies_text(memory: Any) -> str:
    """What layers keep, how often, and what else a plan of memory chose."""
    words = [f"{count} {word}" for word, count in Counter(memory.checkpoint_policies).items()]
    words += [] if memory.reshard_after_forward else ["gathered once"]
    words += [] if memory.sync_each_batch else ["summed once"]
    names = ("offload_optimizer_states", "mlp_tile_tokens", "segment_layers")
    return ", ".join([*words, *(name for name in names if getattr(memory, name))])


def main(names: Sequence[str]) -> None:
    known = json.loads(FILE.read_text()) if FILE.is_file() else {}
    for case in cases():
        if case.name.startswith(tuple(names)) if names else case.name not in known:
            known[case.name] = choose(case)
            print(case.name, known[case.name], flush=True)
            rows = (f" {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(known.items()))
            FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
